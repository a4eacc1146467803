"""Weights that this rank does not have, or no longer uses: computing with one is an error.

``compose`` splits and shards parameters, and a pipeline drops those of other stages. A list of
parameters collected earlier then holds objects that are no longer part of the model: a penalty over
them would change nothing, and nothing would fail. Shape, dtype and device can still be read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from rapidformer.accel.assembly import Assembly
from rapidformer.compat.torch_dispatch import without_torch_function
from rapidformer.compat.torch_tensors import FACTS
from rapidformer.errors import RapidformerError
from rapidformer.overlay import extend, remove


class AbsentWeight(torch.Tensor):
    """Has the shape of a weight, and refuses to be computed with."""

    _explain: Callable[[], str]
    """Why it cannot be used now; empty if it can."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentWeight:
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in FACTS:
            for weight in _find_absent((args, kwargs)):
                if problem := weight._explain():
                    raise RapidformerError(problem)
        with without_torch_function():
            return func(*args, **(kwargs or {}))


def build_placeholder(
    parameter: Tensor, device: torch.device, explain: Callable[[], str]
) -> Tensor:
    """A tensor without memory, all NaN, in place of a weight that another rank holds."""
    value = torch.full((), float("nan"), dtype=parameter.dtype, device=device)
    placeholder: Any = value.expand(parameter.shape).as_subclass(AbsentWeight)
    placeholder._explain = explain
    return placeholder


def apply(assembly: Assembly) -> str | None:
    """Row ``retired parameters``: refuse the use of those that were replaced or dropped."""
    kept = {id(parameter) for parameter in assembly.model.parameters()}
    count = 0
    for name, reference in assembly.applied.plain.names.items():
        retired: Any = reference()
        if retired is not None and id(retired) not in kept:
            extend(retired, "retired", _add_nothing, styles=(AbsentWeight,), is_shared=True)
            retired._explain = functools.partial(_describe_retired, name)
            assembly.applied.on_close(_revive, reference)
            count += 1
    return f"{count} that were replaced" if count else None


def _revive(reference: ReferenceType[nn.Parameter]) -> None:
    retired: Any = reference()
    if retired is not None:
        remove(retired, "retired")
        del retired._explain


def _add_nothing(cls: Any) -> dict[str, Any]:
    return {}


def _describe_retired(name: str) -> str:
    return (
        f"{name} was collected before engine.compose(), which has split it or moved it to another "
        "rank, so this object is no longer part of the model: call model.parameters() after "
        "compose(). To clip gradients call engine.clip_grad_norm(max_norm); for a penalty see "
        "engine.model.gather_weight()."
    )


def _find_absent(value: Any) -> Iterable[AbsentWeight]:
    if isinstance(value, AbsentWeight):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _find_absent(inner)
