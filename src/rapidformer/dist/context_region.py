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

from rapidformer.dist import regions

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
    """While sequences stay whole: in generation, or if every layer's hidden states are wanted."""
    has_attended: bool = False
    """Whether attention was called in this block; a block without it mixes tokens elsewhere."""

    def __post_init__(self) -> None:
        self.size = dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def can_split(self, length: int) -> bool:
        """Whether every rank gets two tokens at least: one looks like a step of generation."""
        last = length - -(-length // self.size) * (self.size - 1)
        return not self.is_off and last > 1

    def enter(self, whole: Tensor) -> Tensor:
        """This rank's tokens."""
        return regions.slice_in(_Scale.apply(whole, 1.0, 1.0 / self.size), TOKENS, self.group)

    def leave(self, part: Tensor, length: int) -> Tensor:
        """All tokens, joined."""
        return regions.gather_out(self.grow(part), TOKENS, length, self.group)

    def grow(self, part: Tensor) -> Tensor:
        """Unchanged, before code that computes one loss jointly from slices of the tokens."""
        return _Scale.apply(part, 1.0, float(self.size))

    def sum(self, part: Tensor) -> Tensor:
        """The sum over the ranks of what each computed from its own tokens."""
        return regions.sum_out(self.grow(part), self.group)

    def slice(self, whole: Tensor, dim: int = TOKENS) -> Tensor:
        """This rank's slice of something that needs no gradient."""
        return regions.take_slice(whole, dim, self.group)

    def split_heads(self, heads: Tensor) -> Tensor:
        """[batch, heads, own tokens, size] -> [batch, own heads, tokens, size]"""
        return _SplitHeads.apply(heads, self.length, self)

    def join_heads(self, attended: Tensor) -> Tensor:
        """[batch, own heads, tokens, size] -> [batch, heads, own tokens, size]"""
        return _JoinHeads.apply(attended, self)


class _Scale(torch.autograd.Function):
    """Given the factor of its result and that of its gradient. The gradient of a gradient has them
    the other way round: cotangents of gradients inside are true ones, not ``size`` times as large.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, factor: float, back: float) -> Tensor:
        ctx.factors = back, factor
        return part.view_as(part) if factor == 1 else part * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Scale.apply(gradient, *ctx.factors), None, None


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, length: int, region: ContextRegion) -> Tensor:
        ctx.region = region
        longest = -(-length // region.size)
        # [ranks, batch, own heads, own tokens, size]: what goes to each rank comes first.
        sent = regions.pad_to(heads, 2, longest).unflatten(1, (region.size, -1)).movedim(1, 0)
        received = _exchange(sent, region.group)
        # Now ordered by source rank, that is, by slices of tokens.
        return received.movedim(0, 2).flatten(2, 3)[:, :, :length].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _JoinHeads.apply(gradient, ctx.region), None, None


class _JoinHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attended: Tensor, region: ContextRegion) -> Tensor:
        ctx.region, ctx.length = region, attended.shape[2]
        longest = -(-ctx.length // region.size)
        padded = regions.pad_to(attended, 2, longest * region.size)
        sent = padded.unflatten(2, (region.size, longest)).movedim(2, 0)
        start, end = regions.get_slice_bounds(ctx.length, region.group)
        received = _exchange(sent, region.group)
        return received.movedim(0, 1).flatten(1, 2)[:, :, : end - start].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _SplitHeads.apply(gradient, ctx.length, ctx.region), None


def _exchange(sent: Tensor, group: Group) -> Tensor:
    """Send row n to rank n."""
    rows = [1] * len(sent)
    return regions.exchange(sent, rows, rows, group)
