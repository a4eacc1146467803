"""Cross entropy over a split vocabulary, or split tokens: no rank holds all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from rapidformer.compat.torch_tensors import check_later
from rapidformer.dist.regions import (
    Group,
    gather_out,
    get_local,
    get_slice_bounds,
    slice_in,
    sum_out,
    sum_over,
    take_slice,
)
from rapidformer.errors import TrainingError

_IGNORED = -100


def is_split_over_vocabulary(logits: Tensor) -> bool:
    """Whether each rank holds only the logits of its part of the vocabulary."""
    return isinstance(logits, DTensor) and logits.placements == (Shard(logits.dim() - 1),)


def check_ids(ids: Tensor, length: int, what: str, ignored: int | None = None) -> None:
    """Refuse an id outside the vocabulary, without waiting for the device."""
    is_known = (ids >= 0) & (ids < length)
    if ignored is not None:
        is_known |= ids == ignored
    check_later(is_known.all(), f"{what} is outside of the {length} of the vocabulary")


def compute_split_losses(logits: Tensor, labels: Tensor, ignore_index: int = _IGNORED) -> Tensor:
    """Cross entropy of each token in fp32, shaped like the labels; 0 where a label is ignored."""
    assert isinstance(logits, DTensor)
    check_ids(labels, logits.shape[-1], "a label", ignore_index)
    words = VocabularySlice(logits.device_mesh.get_group(), logits.shape[-1])
    rows = logits.to_local().float().flatten(0, -2)
    losses = _SplitCrossEntropy.apply(rows, labels.flatten(), ignore_index, words)
    return losses.view_as(labels)


class Scored(NamedTuple):
    """What is known of rows of logits and their labels."""

    losses: Tensor
    """Per row, in fp32; 0 where the label is ignored."""
    gradient: Tensor | None = None
    """Of the sum of the losses, as large as the logits; None if nobody wants it."""
    statistics: Tensor | None = None
    """Several numbers per row, [numbers, rows], in fp32; 0 where the label is ignored."""


@dataclass(frozen=True)
class VocabularySlice:
    """This rank's words of a split vocabulary; ranks exchange small reductions per row."""

    group: Group
    length: int
    """Words in the whole vocabulary."""

    @property
    def width(self) -> int:
        """Words in the largest slice: all ranks must choose the same chunks."""
        return -(-self.length // dist.get_world_size(self.group))

    @property
    def bounds(self) -> tuple[int, int]:
        """This rank's first word, and the one after its last."""
        return get_slice_bounds(self.length, self.group)

    def cut(self, weight: Tensor) -> Tensor:
        """This rank's slice of a weight, unless it is a slice already."""
        return slice_in(weight, 0, self.group) if len(weight) == self.length else weight

    def join(self, logits: Tensor) -> Tensor:
        """The logits of all words."""
        return gather_out(logits, -1, self.length, self.group)

    def find_greatest(self, logits: Tensor) -> Tensor:
        """The largest logit of each row."""
        # With many ranks and a small vocabulary, the last rank may have no part of it.
        is_empty = logits.shape[-1] == 0
        greatest = logits.new_full(logits.shape[:1], -torch.inf) if is_empty else logits.amax(-1)
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=self.group)
        return greatest

    def sum(self, part: Tensor) -> Tensor:
        """The sum over the ranks, without a gradient."""
        return sum_over(part, self.group)

    def score(
        self, logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float = 0.0,
        *, has_gradient: bool = True, has_statistics: bool = False,
    ) -> Scored:  # fmt: skip
        """The rows' cross entropies, and the gradient of this rank's logits."""
        is_kept, width = labels != ignore_index, logits.shape[-1]
        greatest = self.find_greatest(logits.float())
        relative = logits.float() - greatest[:, None]
        index = labels - self.bounds[0]
        is_mine = is_kept & (index >= 0) & (index < width)
        index = index.masked_fill(~is_mine, 0)[:, None]
        chosen = relative.new_zeros(len(labels))
        if width:
            chosen = relative.gather(1, index).squeeze(1).masked_fill(~is_mine, 0.0)
        totals = relative.sum(-1)
        gradient = relative.exp_()  # in place from here on: this is the largest tensor
        mass, chosen, totals = self.sum(torch.stack([gradient.sum(-1), chosen, totals]))
        gradient.div_(mass[:, None])
        losses = mass.log() - (1 - smoothing) * chosen
        if smoothing:  # otherwise the sum may be infinite
            losses -= smoothing / self.length * totals
        losses = losses.masked_fill_(~is_kept, 0.0)
        statistics = None
        if has_statistics:
            entropies = self.sum(torch.special.entr(gradient).sum(-1))
            means = totals / self.length + greatest
            is_best = (chosen == 0).float()  # relative to the largest logit
            statistics = torch.stack([entropies, means, is_best]).masked_fill_(~is_kept, 0.0)
        if not has_gradient:
            return Scored(losses, None, statistics)
        if smoothing:
            gradient -= smoothing / self.length
        if width:
            gradient.scatter_add_(1, index, is_mine.to(gradient.dtype)[:, None] * (smoothing - 1))
        gradient.masked_fill_(~is_kept[:, None], 0.0)
        return Scored(losses, gradient.to(logits.dtype), statistics)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, words: VocabularySlice
    ) -> Tensor:
        scored = words.score(logits, labels, ignore_index, has_gradient=ctx.needs_input_grad[0])
        ctx.save_for_backward(scored.gradient, labels != ignore_index)
        return scored.losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            # What a second gradient needs (the logits) was let go, as it is the largest tensor.
            raise TrainingError(
                "--tensor-model-parallel-size: a gradient of a gradient (create_graph=True) cannot "
                "pass through the loss over the split vocabulary. Call the model without labels "
                "and compute the loss from outputs.logits: that is exact."
            )
        of_logits, is_kept = ctx.saved_tensors
        # Not multiplied by zero: the gradient of a mean over no labels is NaN.
        return of_logits * gradient.masked_fill(~is_kept, 0.0)[:, None], None, None, None


def is_split_over_tokens(logits: Tensor) -> bool:
    """Whether each rank holds the logits of its own tokens only."""
    return isinstance(logits, DTensor) and logits.dim() == 3 and logits.placements == (Shard(1),)


def compute_losses_by_tokens(
    logits: Tensor, labels: Tensor, ignore_index: int = _IGNORED
) -> Tensor:
    """Cross entropy of every token in fp32, shaped like the labels; 0 where a label is ignored."""
    assert isinstance(logits, DTensor)
    own = _compute_own(logits, labels, ignore_index, "none")
    group = logits.device_mesh.get_group()
    return gather_out(own.unflatten(0, (len(labels), -1)), 1, labels.shape[1], group)


def sum_losses_by_tokens(logits: Tensor, labels: Tensor, ignore_index: int = _IGNORED) -> Tensor:
    """The sum over all tokens."""
    assert isinstance(logits, DTensor)
    own = _compute_own(logits, labels, ignore_index, "sum")
    return sum_out(own, logits.device_mesh.get_group())


def _compute_own(logits: DTensor, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
    mine = take_slice(labels, 1, logits.device_mesh.get_group()).flatten()
    rows = get_local(logits).flatten(0, 1).float()
    return functional.cross_entropy(rows, mine, ignore_index=ignore_index, reduction=reduction)
