"""Results of all processes in Accelerate's ways: nested, as objects, each example once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rapidformer.engine.engine import RapidformerEngine
from rapidformer.errors import RapidformerError


def gather_nested(engine: RapidformerEngine, values: Any) -> Any:
    """Every process's rows of a tensor, or of each tensor in nested lists and dictionaries."""
    if isinstance(values, torch.Tensor):
        return engine.gather(values)
    if isinstance(values, Mapping):
        return {name: gather_nested(engine, value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(gather_nested(engine, value) for value in values)
    raise RapidformerError(f"gather() takes tensors, got {type(values).__name__}.")


def gather_for_metrics(
    engine: RapidformerEngine, values: Any, use_gather_object: bool = False
) -> Any:
    """The same for the rows of the current batch.

    A loss (or a text) that was repeated ``batch_size`` times counts as often as a last, smaller
    batch has rows. A list of anything but tensors is joined as objects.
    """
    if use_gather_object or _holds_objects(values):
        kept = engine.data.drop_surplus_items(list(values))
        return engine.data.gather_objects(kept)
    return gather_nested(engine, engine.data.drop_surplus_rows(values))


def _holds_objects(values: Any) -> bool:
    """A list of strings, of numbers, of dictionaries without tensors ..."""
    return isinstance(values, list) and not any(_has_tensor(each) for each in values)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensor(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_tensor(each) for each in value)
    return isinstance(value, torch.Tensor)
