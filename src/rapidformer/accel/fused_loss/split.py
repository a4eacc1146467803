"""The fused loss under tensor parallelism: each rank computes the logits of its words.

Ranks exchange two small reductions per chunk of rows, as they do for undeferred logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from rapidformer.dist.regions import Group, gather_out, get_slice_bounds, slice_in
from rapidformer.dist.vocabulary import compare_rows


@dataclass(frozen=True)
class VocabularySlice:
    """This rank's slice of the vocabulary."""

    group: Group
    length: int
    """Words in the whole vocabulary."""

    @property
    def width(self) -> int:
        """Words in the largest slice: all ranks must choose the same chunks."""
        return -(-self.length // dist.get_world_size(self.group))

    def cut(self, weight: Tensor) -> Tensor:
        """This rank's slice of a weight, unless it is a slice already."""
        return slice_in(weight, 0, self.group) if len(weight) == self.length else weight

    def join(self, logits: Tensor) -> Tensor:
        """The logits of all words."""
        return gather_out(logits, -1, self.length, self.group)

    def differentiate(
        self, logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """The sum of the rows' cross entropies, and its gradient for this rank's logits."""
        is_kept = labels != ignore_index
        first, _ = get_slice_bounds(self.length, self.group)
        rows = compare_rows(logits.float(), labels.masked_fill(~is_kept, -1), first, self.group)
        losses = rows.normalizers - (1 - smoothing) * rows.chosen
        gradient = rows.probabilities
        if smoothing:
            losses = losses - smoothing / self.length * rows.sums
            gradient -= smoothing / self.length
        if gradient.shape[-1]:
            of_label = rows.is_mine.to(gradient.dtype)[:, None] * (smoothing - 1)
            gradient.scatter_add_(1, rows.index[:, None], of_label)
        gradient.masked_fill_(~is_kept[:, None], 0.0)
        return losses.masked_fill(~is_kept, 0.0).sum(), gradient.to(logits.dtype)
