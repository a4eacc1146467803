"""Cross entropy over a split vocabulary, or split tokens: no rank holds all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    sum_out,
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


def compute_split_losses(
    logits: Tensor, labels: Tensor, ignore_index: int = _IGNORED
) -> Tensor:
    """Cross entropy of each token in fp32, shaped like the labels; 0 where a label is ignored."""
    assert isinstance(logits, DTensor)
    group = logits.device_mesh.get_group()
    check_ids(labels, logits.shape[-1], "a label", ignore_index)
    first, _ = get_slice_bounds(logits.shape[-1], group)
    rows = logits.to_local().float().flatten(0, -2)
    losses = _SplitCrossEntropy.apply(rows, labels.flatten(), first, ignore_index, group)
    return losses.view_as(labels)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SplitRows:
    """What the ranks find out together about rows of logits, of which each has some columns."""

    probabilities: Tensor
    """Of this rank's words: [rows, words]."""
    normalizers: Tensor
    """Per row, the logarithm of the sum of all exponentials, less the largest logit."""
    chosen: Tensor
    """Per row, the label's logit, less the largest; 0 if the label is ignored."""
    sums: Tensor
    """Per row, the sum of all logits, each less the largest."""
    index: Tensor
    """Per row, the label's place among this rank's words; 0 if it is not one of them."""
    is_mine: Tensor
    """Per row, whether the label is one of this rank's words."""
    greatest: Tensor
    """Per row, the largest logit."""


def compare_rows(logits: Tensor, labels: Tensor, first: int, group: Group) -> SplitRows:
    """The softmax of rows of fp32 logits; this rank has the words from ``first`` on."""
    width, greatest = logits.shape[-1], find_greatest(logits, group)
    relative = logits - greatest[:, None]
    index = labels - first
    is_mine = (index >= 0) & (index < width)
    index = index.masked_fill(~is_mine, 0)
    chosen = logits.new_zeros(len(labels))
    if width:
        chosen = relative.gather(1, index[:, None]).squeeze(1).masked_fill(~is_mine, 0.0)
    totals = relative.sum(-1)
    exponentials = relative.exp_()
    sums = torch.stack([exponentials.sum(-1), chosen, totals])
    dist.all_reduce(sums, group=group)
    probabilities = exponentials.div_(sums[0][:, None])
    return SplitRows(probabilities, sums[0].log(), sums[1], sums[2], index, is_mine, greatest)


def find_greatest(logits: Tensor, group: Group) -> Tensor:
    """The largest logit of each row, over the words of all ranks."""
    # With many ranks and a small vocabulary, the last rank may have no part of it.
    is_empty = logits.shape[-1] == 0
    greatest = logits.new_full(logits.shape[:1], -torch.inf) if is_empty else logits.amax(-1)
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
    return greatest


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first: int, ignore_index: int, group: Group
    ) -> Tensor:
        is_kept = labels != ignore_index
        # No rank has the word -1.
        rows = compare_rows(logits, labels.masked_fill(~is_kept, -1), first, group)
        ctx.save_for_backward(rows.probabilities, rows.index, rows.is_mine, is_kept)
        return (rows.normalizers - rows.chosen).masked_fill(~is_kept, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            # What a second gradient needs (the logits) was let go, as it is the largest tensor.
            raise TrainingError(
                "--tensor-model-parallel-size: a gradient of a gradient (create_graph=True) cannot "
                "pass through the loss over the split vocabulary. Call the model without labels "
                "and compute the loss from outputs.logits: that is exact."
            )
        probabilities, index, is_mine, is_kept = ctx.saved_tensors
        result = probabilities.clone()
        if result.shape[-1]:
            result.scatter_add_(1, index[:, None], -is_mine.to(result.dtype)[:, None])
        # Not multiplied by zero: the gradient of a mean over no labels is NaN.
        result *= gradient.masked_fill(~is_kept, 0.0)[:, None]
        return result, None, None, None, None


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


def sum_losses_by_tokens(
    logits: Tensor, labels: Tensor, ignore_index: int = _IGNORED
) -> Tensor:
    """The sum over all tokens."""
    assert isinstance(logits, DTensor)
    own = _compute_own(logits, labels, ignore_index, "sum")
    return sum_out(own, logits.device_mesh.get_group())


def _compute_own(logits: DTensor, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
    mine = take_slice(labels, 1, logits.device_mesh.get_group()).flatten()
    rows = get_local(logits).flatten(0, 1).float()
    return functional.cross_entropy(rows, mine, ignore_index=ignore_index, reduction=reduction)
