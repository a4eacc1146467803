"""Join the weights of a pipelined model on rank 0.

Stage by stage and tensor by tensor: no rank but the first ever holds more than one whole tensor of
another stage, and rank 0 keeps them in host memory.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from rapidformer.dist.topology import Topology
from rapidformer.dist.whole import join_whole
from rapidformer.models.plan import find_plan

_Kinds = list[tuple[str, torch.Size, torch.dtype]]


def gather_stages(
    model: nn.Module, topology: Topology, names: Set[str] | None = None
) -> tuple[dict[str, Tensor], list[tuple[str, ...]]]:
    """All weights by name, and which names share a parameter; empty on all ranks but the first.

    Every rank must call this; ``names`` limits it to some of the rank's own weights.
    """
    own: dict[str, Any] = get_model_state_dict(model)
    if names is not None:
        own = {name: weight for name, weight in own.items() if name in names}
    group = topology.get_group("pipeline")
    assert group is not None and topology.mesh is not None
    # Weights in host memory travel like those on the device: both ends must use one backend.
    device = torch.device(topology.mesh.device_type)
    weights: dict[str, Tensor] = {}
    ties: list[tuple[str, ...]] = []
    # One rank of each stage speaks for those that share it.
    is_speaker = dist.get_global_rank(group, 0) == 0
    for stage in range(topology.pipeline):
        kinds: _Kinds = [(name, w.shape, w.dtype) for name, w in own.items()]
        box: list[Any] = [(kinds, find_plan(model).tied)]
        if is_speaker:
            dist.broadcast_object_list(box, group=group, group_src=stage)
            ties += [tie for tie in box[0][1] if tie not in ties]
        if dist.get_rank(group) == stage:
            _send(own, weights, group, device, is_speaker=is_speaker, is_first=stage == 0)
        elif dist.get_rank() == 0:
            for name, shape, dtype in box[0][0]:
                received = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(received, group=group, group_src=stage)
                weights[name] = received.cpu()
    return weights, ties if dist.get_rank() == 0 else []


def _send(
    own: dict[str, Any],
    weights: dict[str, Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    is_speaker: bool,
    is_first: bool,
) -> None:
    for name, weight in own.items():
        # All ranks that share the tensor must join it, whoever needs it.
        whole = join_whole(weight)
        if is_speaker and is_first:
            weights[name] = whole.detach().cpu()
        elif is_speaker:
            dist.send(whole.detach().to(device).contiguous(), group=group, group_dst=0)
