"""``num_items_in_batch``, and the number of processes beside it.

transformers counts the labels of all processes and averages gradients over them, so a loss there
is ``total / num_items_in_batch * num_processes``. Here it is the mean over its own micro-batch, as
in one process, and the loop weighs it. Both mean the same: in a loss that uses the count, a factor
of ``num_processes`` is 1. It stays what it is in any other loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from rapidformer.dist.collectives import is_alone

_SCALES = {
    "mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__", "div", "div_",
    "divide", "divide_", "true_divide", "true_divide_", "__truediv__", "__rdiv__", "__rtruediv__",
}  # fmt: skip


@dataclass
class _Loss:
    """The loss that is computed just now."""

    uses_count: bool = False


_loss: ContextVar[_Loss | None] = ContextVar("loss", default=None)


class LabelCount(torch.Tensor):
    """A number of labels that notices its use; what is computed with it is a plain tensor."""

    plain: torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (loss := _loss.get()) is not None:
            loss.uses_count = True
        return _call(func, args, kwargs or {})


class ProcessCount(int):
    """The number of processes, which scales no loss that uses the count of labels."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def _call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    loss = _loss.get()
    is_neutral = loss is not None and loss.uses_count and func.__name__ in _SCALES
    values = [_to_plain(value, is_neutral=is_neutral) for value in args]
    named = {k: _to_plain(value, is_neutral=is_neutral) for k, value in kwargs.items()}
    return func(*values, **named)


def _to_plain(value: Any, *, is_neutral: bool) -> Any:
    if isinstance(value, LabelCount):
        return value.plain
    if isinstance(value, ProcessCount):
        return 1 if is_neutral else int(value)
    if type(value) in (list, tuple):
        return type(value)(_to_plain(each, is_neutral=is_neutral) for each in value)
    return value


@contextmanager
def counting(count: Any) -> Iterator[Any]:
    """A loss is computed inside; gives the count to pass to it."""
    if not isinstance(count, torch.Tensor) or is_alone() or _loss.get() is not None:
        yield count
        return
    own = count.as_subclass(LabelCount)
    own.plain = count
    token = _loss.set(_Loss())
    try:
        yield own
    finally:
        _loss.reset(token)


def count_processes(number: int) -> int:
    """The number of processes, for a script's loss."""
    return number if _loss.get() is None else ProcessCount(number)
