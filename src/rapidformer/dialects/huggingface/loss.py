"""The loss of a micro-batch, in the ways in which users' code gives it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.dialects.huggingface.label_count import counting
from rapidformer.errors import RapidformerError
from rapidformer.models.own_loss import shifts_labels


def get_loss(outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss that a model has computed itself: its first output."""
    if isinstance(outputs, Mapping) and "loss" not in outputs:
        raise RapidformerError(
            f"the model returned no loss, only {', '.join(outputs)}. It was given "
            f"{', '.join(inputs)}: add labels to the data, pass compute_loss_func=, or override "
            "compute_loss."
        )
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]


def count_labels(model: nn.Module, inputs: Any) -> torch.Tensor | None:
    """Labels of a micro-batch, counted on the device; None where there are none."""
    if not isinstance(inputs, Mapping):
        return None
    if isinstance(shifted := inputs.get("shift_labels"), torch.Tensor):
        return shifted.ne(IGNORED_LABEL).sum()  # the loss compares these as they are
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor):
        return None
    if labels.is_floating_point():
        return torch.full((), len(labels), device=labels.device)
    counted = labels[..., 1:] if shifts_labels(model) and labels.dim() > 1 else labels
    return counted.ne(IGNORED_LABEL).sum()


def call_with_count(function: Callable[..., Any], *arguments: Any, count: Any) -> Any:
    """Call a user's method with the number of labels, if it takes that: older ones do not."""
    plain = function.func if isinstance(function, functools.partial) else function
    # The cache must not keep a bound method, and so a trainer and its model, alive.
    if _takes_count(getattr(plain, "__func__", plain)):
        with counting(count) as own:
            return function(*arguments, num_items_in_batch=own)
    return function(*arguments)


@functools.cache
def _takes_count(function: Callable[..., Any]) -> bool:
    return takes(function, "num_items_in_batch")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name, or takes any."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
