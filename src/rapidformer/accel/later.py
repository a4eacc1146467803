"""What is computed later, if at all: the same as now, or an error that says what has changed since.

Scores, logits and padding exist only once something needs them. Until then, a tensor without values
stands for them, and knows how to compute them from what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch

from rapidformer.compat.torch_compile import break_graph, is_tracing, untraced
from rapidformer.compat.torch_dispatch import tree_leaves, tree_map_only
from rapidformer.compat.torch_tensors import FACTS, count_changes
from rapidformer.errors import ConfigurationError

Noted = tuple[Tensor, int]
"""A tensor, and how often it had been changed in place."""


class LateTensor(torch.Tensor):
    """A tensor whose values are computed once something needs them."""

    meaning: ClassVar[str]
    """What it stands for: code that meets it is not compiled."""

    def compute(self) -> Tensor:
        """The values, in a plain tensor."""
        raise NotImplementedError

    def count_writes(self) -> int:
        """How often it was changed in place."""
        return count_changes(self)

    @classmethod
    def follow(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation that can do without the values; otherwise NotImplemented."""
        raise NotImplementedError

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FACTS:
            return super().__torch_function__(func, types, args, kwargs)
        if is_tracing():
            break_graph(cls.meaning)
        result = cls.follow(func, args, kwargs)
        if result is NotImplemented:
            args, kwargs = tree_map_only(cls, cls.compute, (args, kwargs))
            result = func(*args, **kwargs)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as disabled
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What has bypassed ``__torch_function__``, such as ``torch.tensor(x)``, needs values."""
        with enable_reentrant_dispatch():
            args, kwargs = tree_map_only(cls, cls.compute, (args, kwargs or {}))
        return func(*args, **kwargs)


class StandIn(torch.autograd.Function):
    """A tensor with a shape and a place in the autograd graph, but without values.

    Code that bypasses ``__torch_function__``, and takes it for a real one, meets ``problem``.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, problem: str
    ) -> Tensor:
        ctx.problem = problem
        value = float("nan") if dtype.is_floating_point else 0
        # One value, expanded, takes no memory.
        return torch.full((), value, dtype=dtype, device=anchor.device).expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not hasattr(gradient, _IS_NOTHING) and bool(gradient.any()):
            raise ConfigurationError(ctx.problem)
        return None, None, None, None


_IS_NOTHING = "is_nothing"


def build_nothing(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A gradient of zeros, so that hooks run; a stand-in knows it without a look at its values."""
    nothing = like.new_zeros((), dtype=dtype).expand(shape)  # one value takes no memory
    setattr(nothing, _IS_NOTHING, True)
    return nothing


def note_mode(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """How to enter autograd's and autocast's mode as they are now."""
    kind, has_gradient = device.type, torch.is_grad_enabled()
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    @contextmanager
    def enter() -> Iterator[None]:
        autocast = torch.autocast(kind, dtype=dtype, enabled=dtype is not None)
        with torch.set_grad_enabled(has_gradient), autocast:
            yield

    return enter


def note_version(tensor: Tensor) -> Noted:
    """A tensor, and how often it was changed in place so far."""
    if isinstance(tensor, LateTensor):
        return tensor, tensor.count_writes()
    return tensor, count_changes(tensor)


def have_changed(noted: Iterable[Noted]) -> bool:
    """Whether one of these tensors was changed in place since."""
    return any(note_version(tensor)[1] != version for tensor, version in noted)


def unpack(noted: Noted) -> Tensor:
    """The tensor, unless it has changed: torch does not check those that hooks have packed."""
    if have_changed([noted]):
        raise RuntimeError(
            "one of the variables needed for a gradient has been modified by an inplace operation."
        )
    return noted[0]


def replay_later(
    func: Any, args: Any, kwargs: dict[str, Any], device: torch.device,
    kind: type, compute: Callable[[Any], Tensor], refuse: Callable[[Any], Exception],
) -> Callable[[], Any]:  # fmt: skip
    """The same operation, later, as it would be now; arguments of this kind are computed then."""
    enter_mode = note_mode(device)
    noted = [note_version(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]

    def replay() -> Any:
        if have_changed(noted):
            raise refuse(func)
        known = tree_map_only(kind, compute, (args, kwargs))
        with torch.inference_mode(False), enter_mode():
            return func(*known[0], **known[1])

    return replay
