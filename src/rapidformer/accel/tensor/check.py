"""Check that weights kept whole under tensor parallelism have the same gradient on all ranks.

A plan may miss a layer that works on a slice of the heads or of the width (a norm per head, an
activation with weights). Each rank's gradient is then only a part, the copies drift apart, and no
loss shows it. So the first update compares them; it is the only one that waits for the answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rapidformer.accel.tensor.slices import find_slice
from rapidformer.errors import TrainingError

_SHOWN = 5
# Far above what a different order of summation causes, far below what a missing sum does.
_TOLERANCE = 0.02
_FLOOR = 1e-5


ReadGradient = Callable[[nn.Parameter], torch.Tensor | None]


def get_own_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """A parameter's gradient on this rank."""
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def check_whole_gradients(
    model: nn.Module, group: dist.ProcessGroup, read: ReadGradient = get_own_gradient
) -> None:
    """Raise if ranks that share layers have different gradients for a weight they all hold."""
    names, sums = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and _is_whole(parameter):
            gradient = read(parameter)
            local = torch.zeros(1) if gradient is None else gradient
            names.append(name)
            # Two numbers per gradient: copies that differ do so in at least one of them.
            size = max(local.numel(), 1) ** 0.5
            sums.append(torch.stack([local.float().norm(), local.float().sum() / size]).cpu())
    if not names:
        return
    everyone: list[list[list[float]]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, torch.stack(sums).tolist(), group=group)
    values = torch.tensor(everyone)  # [rank, weight, number]
    spread = values.amax(0) - values.amin(0)
    norms = values[:, :, :1].amax(0)
    differing = (spread > norms * _TOLERANCE + norms.amax() * _FLOOR).any(1).tolist()
    found = [name for name, differs in zip(names, differing, strict=True) if differs]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise TrainingError(
            "--tensor-model-parallel-size: tensor-parallel ranks have different gradients for "
            f"weights that each of them holds whole: {', '.join(found[:_SHOWN])}{more}. The copies "
            "would drift apart. If such a layer works on a slice of the heads or of the width, "
            "give it the style 'replicated_with_grad_allreduce' (engine.compose(plan=...)); if the "
            "forward pass draws random numbers or reads data by rank, it must do the same on all "
            "of them."
        )


def _is_whole(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        slice_ = find_slice(parameter)
        return slice_ is not None and slice_.placement.is_replicate()
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor" in names and parameter.placements[names.index("tensor")].is_replicate()
