"""A rank's slice of a weight: cut from the whole one, as a DTensor or as a plain parameter.

DeepSpeed flattens parameters into buffers of its own, which a DTensor does not survive. Under it,
parameters are plain tensors that remember what they are a slice of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from rapidformer.compat.torch_distributed import StridedShard
from rapidformer.compat.torch_modules import get_parameter_table
from rapidformer.dist.regions import get_slice_bounds
from rapidformer.dist.whole import get_shard, join_parts, join_whole
from rapidformer.errors import TrainingError, list_some


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What a parameter is a slice of."""

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size
    """The shape of the whole weight."""


def distribute(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's slice of a weight that all ranks hold, as a DTensor."""
    slice_ = Slice(mesh=mesh, placement=placement, shape=parameter.shape)
    part = cut_slice(slice_, parameter.data)
    split = join_parts(part, mesh, [placement], parameter.shape)
    return nn.Parameter(split, requires_grad=parameter.requires_grad)


def make_local(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the DTensors on this mesh by plain parameters; tied ones stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        table = get_parameter_table(module)
        for name, parameter in table.items():
            if isinstance(parameter, DTensor) and parameter.device_mesh == mesh:
                if id(parameter) not in replaced:
                    replaced[id(parameter)] = _make_plain(parameter)
                table[name] = replaced[id(parameter)]


def _make_plain(parameter: Any) -> Any:
    values, placement = parameter.detach().to_local().clone(), parameter.placements[0]
    plain: Any = nn.Parameter(values, requires_grad=parameter.requires_grad)
    mesh = parameter.device_mesh
    plain.rapidformer_slice = Slice(mesh=mesh, placement=placement, shape=parameter.shape)
    # DeepSpeed reads this: its gradient norm counts the other weights on one rank only.
    plain.tensor_model_parallel = not placement.is_replicate()
    return plain


def find_slice(parameter: Any) -> Slice | None:
    """What a plain parameter is a slice of, if it is one."""
    return getattr(parameter, "rapidformer_slice", None)


def join_slice(slice_: Slice, own: Tensor) -> Tensor:
    """The whole weight (or its gradient, or optimizer state) from each rank's slice."""
    if slice_.placement.is_replicate():
        return own
    part = own.detach().contiguous()
    return join_whole(join_parts(part, slice_.mesh, [slice_.placement], slice_.shape))


def cut_slice(slice_: Slice, whole: Tensor) -> Tensor:
    """This rank's slice of a whole tensor."""
    placement = slice_.placement
    if placement.is_replicate():
        return whole.contiguous()
    assert isinstance(placement, (Shard, StridedShard))
    dim = placement.dim
    pieces = whole.chunk(getattr(placement, "split_factor", 1), dim)
    start, end = get_slice_bounds(pieces[0].shape[dim], slice_.mesh.get_group())
    return torch.cat([piece.narrow(dim, start, end - start) for piece in pieces], dim)


_SHOWN = 5
# Far above what a different order of summation causes, far below what a missing sum does.
_TOLERANCE = 0.02
_FLOOR = 1e-5


ReadGradient = Callable[[nn.Parameter], torch.Tensor | None]


def check_whole_gradients(model: nn.Module, group: dist.ProcessGroup, read: ReadGradient) -> None:
    """Raise if ranks that share layers have different gradients for a weight they all hold."""
    names, sums = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and _is_whole(parameter):
            gradient = read(parameter)
            local = torch.zeros(1) if gradient is None else get_shard(gradient)
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
        raise TrainingError(
            "--tensor-model-parallel-size: tensor-parallel ranks have different gradients for "
            f"weights that each of them holds whole: {list_some(found, _SHOWN)}. The copies "
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
