"""A rank's slice of a weight: cut from the whole one, as a DTensor or as a plain parameter.

DeepSpeed flattens parameters into buffers of its own, which a DTensor does not survive. Under it,
parameters are plain tensors that remember what they are a slice of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from rapidformer.compat.torch_distributed import StridedShard
from rapidformer.compat.torch_modules import get_parameter_table
from rapidformer.dist.regions import get_slice_bounds
from rapidformer.dist.whole import join_whole


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
    split = distribute_part(part, mesh, placement, parameter.shape)
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
    return join_whole(distribute_part(part, slice_.mesh, slice_.placement, slice_.shape))


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


def distribute_part(
    part: Tensor, mesh: DeviceMesh, placement: Placement, shape: Sequence[int]
) -> DTensor:
    """A tensor of this shape of which each rank has its part already."""
    size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [placement], run_check=False, shape=size, stride=stride)
