"""Cross entropy when tokens are split over ranks: no rank holds all rows of logits."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from rapidformer.dist.regions import gather_out, get_local, sum_out, take_slice

_IGNORED = -100


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
