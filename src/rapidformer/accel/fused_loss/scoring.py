"""Rows of logits and their labels: losses, gradients and statistics.

Under tensor parallelism each rank has a slice of the vocabulary, and ranks find them out together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from rapidformer.dist.regions import Group, gather_out, get_slice_bounds, slice_in, sum_over
from rapidformer.dist.vocabulary import compare_rows


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
    """Ranks exchange small reductions per chunk of rows, as they do for undeferred logits."""

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

    def sum(self, part: Tensor) -> Tensor:
        """The sum over the ranks, without a gradient."""
        return sum_over(part, self.group)

    def score(
        self, logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float,
        *, has_gradient: bool, has_statistics: bool,
    ) -> Scored:  # fmt: skip
        """The rows' cross entropies, and the gradient of this rank's logits."""
        is_kept = labels != ignore_index
        first, _ = self.bounds
        rows = compare_rows(logits.float(), labels.masked_fill(~is_kept, -1), first, self.group)
        losses = rows.normalizers - (1 - smoothing) * rows.chosen
        gradient = rows.probabilities
        statistics = None
        if has_statistics:
            entropies = self.sum(torch.special.entr(gradient).sum(-1))
            means = rows.sums / self.length + rows.greatest
            is_best = (rows.chosen == 0).float()  # relative to the largest logit
            statistics = torch.stack([entropies, means, is_best]).masked_fill_(~is_kept, 0.0)
        if smoothing:
            losses = losses - smoothing / self.length * rows.sums
        losses = losses.masked_fill(~is_kept, 0.0)
        if not has_gradient:
            return Scored(losses, None, statistics)
        if smoothing:
            gradient -= smoothing / self.length
        if gradient.shape[-1]:
            of_label = rows.is_mine.to(gradient.dtype)[:, None] * (smoothing - 1)
            gradient.scatter_add_(1, rows.index[:, None], of_label)
        gradient.masked_fill_(~is_kept[:, None], 0.0)
        return Scored(losses, gradient.to(logits.dtype), statistics)


def score(
    logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float,
    *, has_gradient: bool = True, has_statistics: bool = False,
) -> Scored:  # fmt: skip
    """The rows' cross entropies, and the gradient of their sum in the logits' dtype."""
    is_ignored = (labels == ignore_index)[:, None]
    index = labels[:, None].masked_fill(is_ignored, 0)
    log_probabilities = functional.log_softmax(logits.float(), -1)
    chosen = log_probabilities.gather(1, index)
    losses = chosen * (smoothing - 1)
    if smoothing:
        losses -= smoothing * log_probabilities.mean(-1, keepdim=True)
    is_best = chosen >= log_probabilities.amax(-1, keepdim=True) if has_statistics else None
    losses = losses.masked_fill_(is_ignored, 0.0).squeeze(1)
    if not (has_gradient or has_statistics):
        return Scored(losses)
    # In place from here on: this is the largest tensor.
    gradient = log_probabilities.exp_()
    statistics = None
    if is_best is not None:
        entropies = torch.special.entr(gradient).sum(-1)
        means = logits.mean(-1, dtype=torch.float32)
        statistics = torch.stack([entropies, means, is_best.squeeze(1).float()])
        statistics.masked_fill_(is_ignored.T, 0.0)
    if not has_gradient:
        return Scored(losses, None, statistics)
    if smoothing:
        gradient -= smoothing / gradient.shape[-1]
    gradient.scatter_add_(1, index, torch.full_like(chosen, smoothing - 1))
    gradient.masked_fill_(is_ignored, 0.0)
    return Scored(losses, gradient.to(logits.dtype), statistics)
