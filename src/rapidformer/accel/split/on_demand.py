"""A split tensor in user code: joined by the first operation that needs its values.

``outputs.logits`` of a training step, or a split weight read outside the model. Shape and similar
are known without communication, so a single rank may print them. The underlying tensor is a
placeholder without memory; only autograd sees it, never an operation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rapidformer.compat.torch_dispatch import tree_map_only
from rapidformer.compat.torch_tensors import FACTS
from rapidformer.dist.regions import Group, gather_out, get_local, take_slice

IN_PLACE = re.compile(r".*[^_]_|__(setitem|i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor))__")
_OF_PARAMETERS = {
    Tensor.register_hook, Tensor.requires_grad_,
    *(getattr(Tensor, name).__get__ for name in ("data", "grad")),
}  # fmt: skip


class WholeOnDemand(torch.Tensor):
    """The whole of a tensor of which each rank holds a slice."""

    _part: Tensor
    _join: Callable[[], Tensor]
    _joined: Tensor | None
    _source: Tensor | None

    def full_tensor(self) -> Tensor:
        """The whole as a plain tensor; all ranks that hold a slice must call this."""
        if self._joined is None:
            self._joined = self._join()
        return self._joined

    def to_local(self) -> Tensor:
        """This rank's slice."""
        return self._part

    def __repr__(self) -> str:  # type: ignore[override]
        # Without the values: a single rank may print it.
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FACTS:
            return super().__torch_function__(func, types, args, kwargs)
        first, name = args[0] if args else None, getattr(func, "__name__", "")
        # Something that only the weight has, a change of it in place, or a view to change it by.
        is_view = func is Tensor.__getitem__ and not torch.is_grad_enabled()
        is_attribute = func in _OF_PARAMETERS or name in ("__set__", "__delete__")
        is_own = is_view or is_attribute or IN_PLACE.fullmatch(name)
        if is_own and isinstance(first, cls) and first._source is not None:
            if name == "__get__":
                return func(first._source)
            if name == "__set__":
                return setattr(first._source, func.__self__.__name__, args[1])
            if name == "__delete__":
                return delattr(first._source, func.__self__.__name__)
            # The parameter may have one of its own, such as our hooks and items.
            return getattr(first._source, name)(*args[1:], **kwargs)
        args, kwargs = tree_map_only(cls, cls.full_tensor, (args, kwargs))
        return func(*args, **kwargs)


def join_on_demand(
    part: Tensor, dim: int, length: int, group: Group, source: Tensor | None = None
) -> Tensor:
    """The whole of which ``part`` is this rank's slice; ``source`` is its parameter."""
    dim %= part.dim()
    stand_in = _StandIn.apply(part, dim, length, group)
    whole: Any = stand_in.as_subclass(WholeOnDemand)
    whole._part, whole._source, whole._joined = part, source, None
    whole._join = lambda: gather_out(part, dim, length, group)
    return whole


def stand_for(source: Tensor, values: Tensor) -> Tensor:
    """The values of a parameter that every rank holds whole."""
    whole: Any = values.view_as(values).as_subclass(WholeOnDemand)
    whole._part = whole._joined = values
    whole._source = source
    return whole


def hand_out(output: Any) -> Any:
    """A model's output, whose split tensors are joined once something computes with them."""

    def wrap(split: DTensor) -> Tensor:
        dim = getattr(split.placements[0], "dim", None)
        if dim is None or split.device_mesh.ndim > 1:
            return split
        return join_on_demand(
            get_local(split), dim, split.shape[dim], split.device_mesh.get_group()
        )

    return tree_map_only(DTensor, wrap, output)


class _StandIn(torch.autograd.Function):
    """Keeps the graph complete for code that passes the tensor to autograd without an operation."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, length: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        shape = [*part.shape]
        shape[dim] = length
        return part.new_full((), float("nan")).expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return take_slice(gradient, ctx.dim, ctx.group), None, None, None
