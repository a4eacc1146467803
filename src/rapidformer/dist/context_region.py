"""The part of a model where each rank holds a slice of every sequence.

Before and after it, all ranks of the group hold the whole sequence and compute the same loss. Mind
the factor: gradients are summed over these ranks, and so are the loss weights, so every gradient
must come out ``size`` times the true one. Outside this happens by itself, because each rank has
everything. Inside, each rank has its slice, so gradients grow by ``size`` on their way in
(``leave``) and shrink again on their way out (``enter``).

Attention needs all tokens: there each rank takes all tokens of its slice of the *heads* (Ulysses),
with one exchange before and one after.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rapidformer.compat.torch_collectives import operations
from rapidformer.dist.regions import (
    gather_slices,
    pad_to,
    take_slice,
    sum_over,
    wait,
    get_slice_bounds,
)

Group = dist.ProcessGroup
TOKENS = 1
"""The dimension of hidden states that is split."""


@dataclass(eq=False)
class ContextRegion:
    """The ranks that share each sequence, and the state of the current forward pass."""

    group: Group
    size: int = field(init=False)
    length: int = 0
    """Sequence length in the block that is running; 0 if it has whole sequences."""
    incoming: int = 0
    """The same for the current forward pass, between two blocks."""
    is_off: bool = False
    """True while sequences stay whole: in generation, or if hidden states of every layer are
    requested.
    """
    has_attended: bool = False
    """Whether attention was called in this block; a block without it mixes tokens elsewhere."""

    def __post_init__(self) -> None:
        self.size = dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def can_split(self, length: int) -> bool:
        """Whether every rank gets at least two of this many tokens: a single token looks to a model
        like a generation step, which is not causal.
        """
        last = length - -(-length // self.size) * (self.size - 1)
        return not self.is_off and last > 1

    def enter(self, whole: Tensor) -> Tensor:
        """This rank's tokens."""
        return _Slice.apply(whole, self, 1.0, 1.0 / self.size)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, part: Tensor, length: int) -> Tensor:
        """All tokens, joined."""
        return _Gather.apply(part, length, self, 1.0, float(self.size))  # type: ignore[no-any-return,no-untyped-call]

    def grow(self, part: Tensor) -> Tensor:
        """The same, if the following code computes one loss jointly from slices of the tokens."""
        return _Scale.apply(part, 1.0, float(self.size))  # type: ignore[no-any-return,no-untyped-call]

    def sum(self, part: Tensor) -> Tensor:
        """The sum over the ranks of what each computed from its own tokens."""
        return _Sum.apply(part, self, 1.0, float(self.size))  # type: ignore[no-any-return,no-untyped-call]

    def slice(self, whole: Tensor, dim: int = TOKENS) -> Tensor:
        """This rank's slice of something that needs no gradient."""
        return take_slice(whole, dim, self.group)

    def split_heads(self, heads: Tensor) -> Tensor:
        """[batch, heads, own tokens, size] -> [batch, own heads, tokens, size]"""
        return _SplitHeads.apply(heads, self.length, self)  # type: ignore[no-any-return,no-untyped-call]

    def join_heads(self, attended: Tensor) -> Tensor:
        """[batch, own heads, tokens, size] -> [batch, heads, own tokens, size]"""
        return _JoinHeads.apply(attended, self)  # type: ignore[no-any-return,no-untyped-call]


# Each is given the factor of its result and that of its gradient. The gradient of a gradient has
# them the other way round: cotangents of gradients inside are true ones, not ``size`` times as large.


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, region: ContextRegion, factor: float, back: float
    ) -> Tensor:
        ctx.length, ctx.region, ctx.factors = whole.shape[TOKENS], region, (back, factor)
        return _scale(take_slice(whole, TOKENS, region.group), factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Gather.apply(gradient, ctx.length, ctx.region, *ctx.factors), None, None, None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, length: int, region: ContextRegion, factor: float, back: float
    ) -> Tensor:
        ctx.region, ctx.factors = region, (back, factor)
        return _scale(gather_slices(part, TOKENS, length, region.group), factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Slice.apply(gradient, ctx.region, *ctx.factors), None, None, None, None  # type: ignore[no-untyped-call]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, factor: float, back: float) -> Tensor:
        ctx.factors = back, factor
        return part.view_as(part) if factor == 1 else part * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Scale.apply(gradient, *ctx.factors), None, None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, region: ContextRegion, factor: float, back: float
    ) -> Tensor:
        ctx.region, ctx.factors = region, (back, factor)
        return _scale(sum_over(part, region.group), factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Copy.apply(gradient, ctx.region, *ctx.factors), None, None, None  # type: ignore[no-untyped-call]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, region: ContextRegion, factor: float, back: float
    ) -> Tensor:
        ctx.region, ctx.factors = region, (back, factor)
        return whole * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Sum.apply(gradient, ctx.region, *ctx.factors), None, None, None  # type: ignore[no-untyped-call]


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, length: int, region: ContextRegion) -> Tensor:
        ctx.region = region
        return _split_heads(heads, length, region.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _JoinHeads.apply(gradient, ctx.region), None, None  # type: ignore[no-untyped-call]


class _JoinHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attended: Tensor, region: ContextRegion) -> Tensor:
        ctx.region, ctx.length = region, attended.shape[2]
        return _join_heads(attended, region.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _SplitHeads.apply(gradient, ctx.length, ctx.region), None  # type: ignore[no-untyped-call]


def _scale(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def _split_heads(heads: Tensor, length: int, group: Group) -> Tensor:
    world_size = dist.get_world_size(group)
    longest = -(-length // world_size)
    # [ranks, batch, own heads, own tokens, size]: what goes to each rank comes first.
    sent = pad_to(heads, 2, longest).unflatten(1, (world_size, -1)).movedim(1, 0)
    received = _exchange(sent, group)
    # Now ordered by source rank, that is, by slices of tokens.
    return received.movedim(0, 2).flatten(2, 3)[:, :, :length].contiguous()


def _join_heads(attended: Tensor, group: Group) -> Tensor:
    world_size, length = dist.get_world_size(group), attended.shape[2]
    longest = -(-length // world_size)
    padded = pad_to(attended, 2, longest * world_size)
    received = _exchange(padded.unflatten(2, (world_size, longest)).movedim(2, 0), group)
    start, end = get_slice_bounds(length, group)
    return received.movedim(0, 1).flatten(1, 2)[:, :, : end - start].contiguous()


def _exchange(sent: Tensor, group: Group) -> Tensor:
    """Send row n to rank n."""
    rows = [1] * len(sent)
    return wait(operations.all_to_all_single(sent.contiguous(), rows, rows, group.group_name))
