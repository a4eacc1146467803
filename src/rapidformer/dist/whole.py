"""The part of a split tensor that a rank holds, and the whole tensor.

That is ``full_tensor``, except for a fused weight (query, key and value side by side) of which a
rank holds a piece of each part. torch 2.11 cannot join one: its parts are joined as separate
matrices.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from rapidformer.compat.torch_distributed import StridedShard

_MOST_AT_ONCE = 2**24
"""Elements that are joined in one collective. Joining a larger tensor like this would need its
memory twice, and gain nothing."""


def get_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a split tensor; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.requires_grad:
        return tensor.to_local()
    with torch.no_grad():  # otherwise torch calls an autograd function, which takes 25 us
        return tensor.to_local()


def join_parts(
    part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """A tensor of this shape of which each rank has its part already."""
    size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=stride)


def gather_with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The whole weight, for use in a loss: its gradient, summed over tokens, goes to the shards."""
    if not isinstance(tensor, DTensor):
        return tensor
    names = tensor.device_mesh.mesh_dim_names or ()
    return _join(tensor, [Replicate() if name == "tensor" else Partial() for name in names])


def join_whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank; every rank that holds a part must call this."""
    [(_, whole)] = join_each([tensor])
    return whole


def join_each(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Each tensor whole, after its index. Small ones are joined many at a time, and come last."""
    alike: dict[tuple[DeviceMesh, int, torch.dtype], list[tuple[int, DTensor]]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            yield index, tensor
        elif (axis := _find_axis_of_equal_slices(tensor)) is None or tensor.numel() > _MOST_AT_ONCE:
            yield index, _join(tensor)
        else:
            alike[tensor.device_mesh, axis, tensor.dtype].append((index, tensor))
    for (mesh, axis, _), members in alike.items():
        while members:
            sizes = itertools.accumulate(tensor.numel() for _, tensor in members)
            count = sum(size <= _MOST_AT_ONCE for size in sizes)
            yield from _join_equal_slices(mesh, axis, members[:count])
            members = members[count:]


def _find_axis_of_equal_slices(tensor: DTensor) -> int | None:
    """The only axis of the mesh that a tensor is split over, if all ranks hold equally much."""
    mesh = tensor.device_mesh
    axes = [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(axes) != 1 or tensor.device.type != mesh.device_type:
        return None
    placement = tensor.placements[axes[0]]
    is_even = type(placement) is Shard and tensor.shape[placement.dim] % mesh.size(axes[0]) == 0
    return axes[0] if is_even else None


def _join_equal_slices(
    mesh: DeviceMesh, axis: int, members: list[tuple[int, DTensor]]
) -> Iterator[tuple[int, torch.Tensor]]:
    with torch.no_grad():
        slices = [tensor.to_local() for _, tensor in members]
    mine = torch.cat([part.reshape(-1) for part in slices])
    everyones = [torch.empty_like(mine) for _ in range(mesh.size(axis))]
    torch.distributed.all_gather(everyones, mine, mesh.get_group(axis))
    parts = [flat.split([part.numel() for part in slices]) for flat in everyones]
    for (index, tensor), part, flat in zip(members, slices, zip(*parts, strict=True), strict=True):
        dim = cast(Shard, tensor.placements[axis]).dim
        yield index, torch.cat([piece.view(part.shape) for piece in flat], dim)


def _join(tensor: DTensor, gradient: list[Any] | None = None) -> torch.Tensor:
    split: Any = tensor
    mesh = split.device_mesh
    if split.device.type != mesh.device_type:
        # It lives in host memory, which the process group may not reach.
        split = split.to(mesh.device_type)
    axis = find_strided_axis(split)
    if axis is None:
        return split.full_tensor(grad_placements=gradient)
    dim, parts = split.placements[axis].dim, split.placements[axis].split_factor
    placements: list[Any] = [
        Shard(p.dim + (p.dim > dim)) if isinstance(p, Shard) else p for p in split.placements
    ]
    placements[axis] = Shard(dim + 1)
    before, length, after = split.shape[:dim], split.shape[dim], split.shape[dim + 1 :]
    own = split.to_local().unflatten(dim, (parts, -1)).contiguous()
    by_parts = join_parts(own, mesh, placements, (*before, parts, length // parts, *after))
    return by_parts.full_tensor(grad_placements=gradient).flatten(dim, dim + 1)


def find_strided_axis(tensor: torch.Tensor) -> int | None:
    """The axis of pieces that are not contiguous, unlike FSDP's with the same marker; or None."""
    if not isinstance(tensor, DTensor):
        return None
    for axis, placement in enumerate(tensor.placements):
        later = tensor.placements[axis + 1 :]
        if isinstance(placement, StridedShard) and not any(
            getattr(other, "dim", None) == placement.dim for other in later
        ):
            return axis
    return None


@functools.cache
def can_compute_on_strided(mesh: DeviceMesh) -> bool:
    """Whether torch itself can join what ``find_strided_axis`` finds, as its operations must."""
    parts = mesh.size() + 1  # a number that is no size of the mesh, which torch 2.11 could decode
    local = torch.zeros(parts, device=mesh.device_type)
    split: Any = DTensor.from_local(
        local, mesh, [StridedShard(0, split_factor=parts)], run_check=False
    )
    try:
        split.full_tensor()
    except ValueError:  # before anything is sent
        return False
    return True
