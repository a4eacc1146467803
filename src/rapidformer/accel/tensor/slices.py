"""A rank's slice of a weight: cut from the whole one, as a DTensor or as a plain parameter.

DeepSpeed flattens parameters into buffers of its own, which a DTensor does not survive. Under it,
parameters are plain tensors that remember what they are a slice of.
"""

from __future__ import annotations

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
    whole = parameter.data
    slice_ = Slice(mesh=mesh, placement=placement, shape=whole.shape)
    split = _as_distributed(slice_, _cut(whole, slice_).contiguous())
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


def _make_plain(parameter: Any) -> nn.Parameter:
    plain: Any = nn.Parameter(
        parameter.detach().to_local().clone(), requires_grad=parameter.requires_grad
    )
    placement = parameter.placements[0]
    plain.rapidformer_slice = Slice(
        mesh=parameter.device_mesh, placement=placement, shape=parameter.shape
    )
    # DeepSpeed reads this: its gradient norm counts the other weights on one rank only.
    plain.tensor_model_parallel = not placement.is_replicate()
    return plain  # type: ignore[no-any-return]


def find_slice(parameter: Any) -> Slice | None:
    """What a plain parameter is a slice of, if it is one."""
    return getattr(parameter, "rapidformer_slice", None)


def join_slice(slice_: Slice, own: Tensor) -> Tensor:
    """The whole weight (or its gradient, or optimizer state) from each rank's slice."""
    if slice_.placement.is_replicate():
        return own
    return join_whole(_as_distributed(slice_, own.detach().contiguous()))


def cut_slice(slice_: Slice, whole: Tensor) -> Tensor:
    """This rank's slice of a whole tensor."""
    return _cut(whole, slice_).contiguous()


def _cut(whole: Tensor, slice_: Slice) -> Tensor:
    placement = slice_.placement
    if placement.is_replicate():
        return whole
    assert isinstance(placement, (Shard, StridedShard))
    dim = placement.dim
    parts = getattr(placement, "split_factor", 1)
    pieces = whole.chunk(parts, dim)
    start, end = get_slice_bounds(pieces[0].shape[dim], slice_.mesh.get_group())
    return torch.cat([piece.narrow(dim, start, end - start) for piece in pieces], dim)


def _as_distributed(slice_: Slice, own: Tensor) -> DTensor:
    return DTensor.from_local(
        own,
        slice_.mesh,
        [slice_.placement],
        run_check=False,
        shape=slice_.shape,
        stride=torch.empty(slice_.shape, device="meta").stride(),
    )
