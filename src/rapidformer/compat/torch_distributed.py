"""Between ranks: collectives that ``torch.compile`` can trace, meshes, split tensors, files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import IOBase
from types import FrameType
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from rapidformer.compat.patches import ignore_warnings, quieten

__all__ = ["StridedShard"]

PRIVATE_NAMES = {
    "torch.distributed.distributed_c10d._get_default_store": "ranks that agree where to stop",
    "torch.distributed.ProcessGroup._get_backend": "what counts a group's collectives",
    "torch.distributed.ProcessGroup._device_types": "the same",
    "torch._C._distributed_c10d.Backend._get_sequence_number_for_group": (
        "whether a rank is in a collective that another one has not entered"
    ),
    "sys._current_frames": "where a rank waits that has not come to a call of all ranks",
    "torch.distributed._broadcast_coalesced": "weights of the first rank for all, many at a time",
    "torch.distributed.tensor.DTensor._local_tensor": "where hundreds of shards are, in every step",
    "torch.distributed.device_mesh.DeviceMesh._flatten": "groups over two axes of a run",
    "torch.distributed.tensor.placement_types._StridedShard": "fused weights split by heads",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": (
        "where a rank's slice of a fused weight is in a checkpoint"
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo": "writing a checkpoint's index",
    "torch.distributed.checkpoint.utils._create_file_view": "reading a checkpoint's tensors",
} | {
    f"torch.ops._c10d_functional.{name}": "collectives inside a compiled model"
    for name in (
        "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
        "wait_tensor",
    )
}  # fmt: skip

QUIET_JOINING = quieten("torch.distributed.tensor._redistribute")
"""Inside, no warning about every weight that an export joins in two steps, which is intended."""
QUIET_VIEWS = ignore_warnings("FSDP2-wrapped module .* returned a view tensor")
"""Any head with a bias returns one. It matters only to code that changes outputs in place."""

# The operators are the same in all versions; their Python names are not.
operations: Any = torch.ops._c10d_functional


def gather_flat(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """Fill ``whole`` with the parts of all ranks, one after the other."""
    distributed: Any = torch.distributed
    gather = getattr(distributed, "all_gather_single", None)  # from torch 2.13 on
    (gather or distributed.all_gather_into_tensor)(whole, part, group=group)


def scatter_sum(part: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    """Sum ``whole`` over the ranks, and fill ``part`` with this rank's part of the sum."""
    distributed: Any = torch.distributed
    scatter = getattr(distributed, "reduce_scatter_single", None)  # from torch 2.13 on
    (scatter or distributed.reduce_scatter_tensor)(part, whole, group=group)


def list_local(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts of split tensors, and other tensors themselves, without autograd.

    ``to_local`` takes some microseconds for each of them.
    """
    return [each._local_tensor if isinstance(each, DTensor) else each for each in tensors]


def get_default_store() -> Any:
    """The key-value store through which the ranks have found each other."""
    return distributed_c10d._get_default_store()


def count_collectives() -> list[int]:
    """How many collectives of all ranks this rank has entered, by backend; 0 where none counts.

    Gloo also counts the tensors that a rank sends or receives.
    """
    world: Any = distributed_c10d.group.WORLD  # whose types do not know the methods
    return [_count_entered(world._get_backend(device)) for device in world._device_types]


def _count_entered(backend: Any) -> int:
    try:
        return int(backend._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def find_frame(thread: int) -> FrameType | None:
    """Where a thread of this process is just now."""
    return sys._current_frames().get(thread)


def broadcast_from_first(tensors: Sequence[torch.Tensor]) -> None:
    """Write the first rank's values into all ranks' tensors; small ones travel together."""
    if not tensors:
        return  # a model without weights: torch takes no empty list
    world = distributed_c10d.group.WORLD
    assert world is not None
    send = torch.distributed._broadcast_coalesced  # type: ignore[attr-defined]
    send(world, list(tensors), 2**25, 0)  # bytes at a time


def join_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The same ranks as a single axis."""
    return mesh._flatten(name)


def open_part(file: IOBase, start: int, length: int) -> Any:
    """Some bytes of a file as a file of their own, read as they are needed."""
    from torch.distributed.checkpoint.utils import _create_file_view

    return _create_file_view(file, start, length)


def find_offset(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[int, ...]:
    """Where this rank's slice of a split tensor begins, in each dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(start)


def build_place(file: str, start: int, length: int) -> Any:
    """A range of bytes in one of a checkpoint's files, as torch's own index says it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(relative_path=file, offset=start, length=length)
