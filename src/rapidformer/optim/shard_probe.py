"""Whether the user's optimizer updates a sharded weight as it would update the whole one.

Most optimizers treat every element by itself, so shards make no difference to them. Muon,
Adafactor and others look at rows or matrices; on shards some fail inside torch, and others silently
compute something else. So an unknown optimizer is tried on a small matrix, whole and sharded,
before training starts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop

from rapidformer.errors import ConfigurationError

_ELEMENTWISE = (Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, SGD)
_STEPS = 3
# Round-off is far below it, another update far above.
_TOLERANCE = 1e-3

Layout = tuple[DeviceMesh, tuple[Shard | Replicate, ...], int]
"""A mesh, where each of its axes splits, and the number of dimensions."""


def check_given_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that does not work on the model's sharded weights; all ranks call it."""
    # torch's fused SGD does not know sharded tensors; its fused Adam does.
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if type(optimizer) in _ELEMENTWISE and not (is_fused and type(optimizer) is SGD):
        return
    tried: set[Layout] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, DTensor):
                continue
            if isinstance(optimizer, Muon):
                # Its bf16 products round differently on shards: by 3% of an update, but not always
                # in a matrix as small as the probe's.
                raise ConfigurationError(_explain("Muon", "rounds differently on sharded weights"))
            placements = tuple(
                Replicate() if placement.is_replicate() else Shard(getattr(placement, "dim", 0))
                for placement in parameter.placements
            )
            layout = parameter.device_mesh, placements, parameter.dim()
            if layout not in tried:
                tried.add(layout)
                _try(optimizer, group, layout)


def _try(optimizer: Optimizer, group: dict[str, Any], layout: Layout) -> None:
    mesh, placements, dimensions = layout
    shape = (4 * mesh.size(),) * dimensions
    count = torch.Size(shape).numel()
    start = torch.arange(count, dtype=torch.float32, device=mesh.device_type).sin().view(shape)
    try:
        whole = _update(optimizer, group, nn.Parameter(start.clone()), start)
    except Exception:  # it cannot be rebuilt from its settings: nothing is known about it
        return
    name = type(optimizer).__name__
    try:
        # Cloned, because a replicated tensor would share its memory with the original.
        shards = nn.Parameter(distribute_tensor(start.clone(), mesh, placements))
        gradient = distribute_tensor(start.clone(), mesh, placements)
        updated = _update(optimizer, group, shards, gradient).full_tensor()
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
        raise ConfigurationError(_explain(name, f"fails on sharded weights ({reason})")) from error
    change = (whole - start).abs().max()
    if bool((updated - whole).abs().max() > _TOLERANCE * change):
        raise ConfigurationError(_explain(name, "updates a sharded weight unlike the whole one"))


def _update(
    optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter, gradient: torch.Tensor
) -> Any:
    """A few updates by another optimizer of the same class and settings."""
    cls: Any = type(optimizer)
    settings = {key: value for key, value in group.items() if key != "params"}
    if settings.get("lr") is not None:  # a warm-up may have set it to zero
        settings["lr"] = 0.1
    twin = cls([{**settings, "params": [parameter]}], **optimizer.defaults)
    for step in range(_STEPS):
        parameter.grad = (gradient * 7.0 + step).cos()
        twin.step()
    return parameter.detach()


def _explain(name: str, what: str) -> str:
    return (
        f"the optimizer {name} {what}, and ZeRO/FSDP, tensor and expert parallelism give each rank "
        "only a shard of every weight. Use AdamW or SGD, or leave those switches out."
    )
