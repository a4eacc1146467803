"""Head and loss on each rank's own tokens: for long sequences, logits are the largest tensor.

Only if the model computes its own loss by a function that we know; otherwise every rank has the
logits of all tokens. Inside the model, logits are then a DTensor over the tokens;
``outputs.logits`` are joined on demand. A head with the fused loss only gets the region: it splits
rows itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from rapidformer.accel.split.known_loss import find_head, use_split_loss
from rapidformer.accel.tensor.slices import distribute_part
from rapidformer.accel.tensor.styles import Split, extend_module
from rapidformer.dist.context_region import TOKENS, ContextRegion
from rapidformer.dist.token_losses import is_split_over_tokens, sum_losses_by_tokens
from rapidformer.models.plan import ModelPlan
from rapidformer.overlay import find_fact, get_fact, list_layers, put_fact


@dataclass(kw_only=True, eq=False)
class SplitHeadPlace:
    """What the output layer knows."""

    region: ContextRegion
    mesh: DeviceMesh
    keeps_slice: bool = False
    """True while the model computes its own loss, in training."""


def apply_split_loss(
    model: Any, plan: ModelPlan, region: ContextRegion, mesh: DeviceMesh
) -> SplitHeadPlace | None:
    """Let the head work on a slice of the tokens if the model's loss allows it."""
    head = find_head(model)
    if not isinstance(head, nn.Linear):
        return None
    if "loss" in list_layers(head):
        put_fact(head, region)  # the fused loss splits its rows over these ranks
        return None
    if find_fact(head, Split) is not None:
        return None  # tensor parallelism splits the logits already
    if not use_split_loss(model, plan, is_split_over_tokens, sum_losses_by_tokens):
        return None
    place = SplitHeadPlace(region=region, mesh=mesh)
    extend_module(head, SplitHead, place)
    return place


class SplitHead:
    """The output layer: takes all tokens, and in training keeps this rank's."""

    def forward(self, hidden: Tensor) -> Tensor:
        place = get_fact(self, SplitHeadPlace)
        region, length = place.region, hidden.shape[TOKENS] if hidden.dim() == 3 else 0
        if not (place.keeps_slice and length and region.can_split(length)):
            whole: Tensor = super().forward(hidden)  # type: ignore[misc]
            return whole
        part = region.grow(super().forward(region.enter(hidden)))  # type: ignore[misc]
        shape = (part.shape[0], length, part.shape[2])
        return distribute_part(part, place.mesh, Shard(TOKENS), shape)
