"""The arguments of a block's call, and copies of them at fixed places in memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.unpad.masks import Fused, RowMask
from rapidformer.compat.torch_dispatch import (
    has_saved_tensor_hooks,
    tree_leaves,
    tree_map_only,
)
from rapidformer.compat.torch_modules import caches_weights

_PLAIN = (type(None), bool, int, float, str)
_VALUE = "a tensor or a mask"
"""Where one stands among the constants of a call."""


@dataclass(frozen=True)
class BlockCall:
    """One call of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: list[Any]
    """The tensors and row masks among its arguments, in order."""
    constants: tuple[Hashable, ...]
    """Everything that Python code can see of its arguments except for tensors."""

    @cached_property
    def form(self) -> Hashable:
        """The same with what can be seen of tensors, except their values."""
        return (*self.constants, *map(_describe, self.values))

    @property
    def is_rounded(self) -> bool:
        """Whether it has one of a few sizes."""
        return any(isinstance(value, RowMask) for value in self.values)

    @property
    def trained(self) -> list[Tensor]:
        """The tensors that need a gradient."""
        return [each for each in self.values if isinstance(each, Tensor) and each.requires_grad]


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall | None:
    """A call that can be replayed; None if something in it may hold more than its values."""
    values: list[Any] = []
    constants: list[Hashable] = [len(args), *kwargs]
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, _PLAIN):
            constants.append(leaf)
        elif _is_plain_tensor(leaf) or (isinstance(leaf, RowMask) and leaf.fused is not None):
            values.append(leaf)
            constants.append(_VALUE)
        else:
            return None
    return BlockCall(args, kwargs, values, tuple(constants))


def _is_plain_tensor(leaf: Any) -> bool:
    return type(leaf) in (Tensor, nn.Parameter) and leaf.layout == torch.strided


def _describe(value: Any) -> Hashable:
    if isinstance(value, RowMask):
        assert value.fused is not None
        fused = value.fused
        return fused.sizes, fused.largest_head, fused.are_short
    return value.shape, value.stride(), value.dtype, value.requires_grad


class StaticCall:
    """The same arguments, with tensors that keep their addresses."""

    def __init__(self, call: BlockCall, known: dict[int, tuple[Any, Any]]) -> None:
        """``known`` has copies that other blocks use, by the ids of their originals."""

        def fix(value: Any) -> Any:
            if id(value) not in known:
                static = _fix_mask(value) if isinstance(value, RowMask) else _copy(value)
                known[id(value)] = value, static
            return known[id(value)][1]

        self.arguments = tree_map_only((Tensor, RowMask), fix, (call.args, call.kwargs))
        self._values = [fix(value) for value in call.values]
        self.trained = [
            each for each in self._values if isinstance(each, Tensor) and each.requires_grad
        ]

    def shifted(self) -> AbstractContextManager[None]:
        """Inside, each token has the values of the one before it: a replay must see that."""
        return shifting(self.trained, lambda x: x.roll(1, -2) if x.dim() > 1 else x)

    @staticmethod
    def read(call: BlockCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, to run it without a graph."""
        return call.args, call.kwargs

    def fill(self, call: BlockCall) -> None:
        """Copy in the arguments of another call of the same form."""
        for static, value in zip(self._values, call.values, strict=True):
            if isinstance(static, Tensor):
                write(static, value)
            else:
                for mine, theirs in zip(_list_ends(static), _list_ends(value), strict=True):
                    write(mine, theirs)


def write(static: Tensor, value: Tensor) -> None:
    """Overwrite a tensor, which autograd need not know: a graph's saved tensors change with it."""
    static.data.copy_(value.detach())


@contextmanager
def shifting(tensors: Sequence[Tensor], shift: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, tensors have other values at the same places."""
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    for tensor, value in values:
        write(tensor, shift(value))
    try:
        yield
    finally:
        for tensor, value in values:
            write(tensor, value)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _fix_mask(mask: RowMask) -> RowMask:
    ends, key_ends = _list_ends(mask)
    copy = _copy(ends)
    assert mask.fused is not None
    fused = replace(mask.fused, ends=copy, key_ends=copy if key_ends is ends else _copy(key_ends))
    return replace(mask, rows=replace(mask.rows, is_fixed=True), fused=fused)


def _list_ends(mask: RowMask) -> tuple[Tensor, Tensor]:
    fused: Fused | None = mask.fused
    assert fused is not None
    return fused.ends, fused.key_ends


def may_record() -> bool:
    """Whether a pass that begins now has gradients, and nothing of the script's keeps parts of it:
    a checkpoint, offloading, or weights that are computed once for several calls."""
    is_kept = has_saved_tensor_hooks() or caches_weights()
    return torch.is_grad_enabled() and not is_kept


def describe_mode(device: torch.device) -> Hashable:
    """What decides here and now in which precision operations run, and which tensors they make."""
    kind = device.type
    return (
        torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind),
        torch.is_inference_mode_enabled(),  # whose tensors cannot be overwritten elsewhere
    )  # fmt: skip


@contextmanager
def without_cast_cache() -> Iterator[None]:
    """Inside, autocast keeps no copies of weights: a graph must make its own."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
