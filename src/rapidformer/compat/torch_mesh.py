"""Device meshes, and tensors split over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard"]

PRIVATE_NAMES = {
    "torch.distributed.device_mesh.DeviceMesh._flatten": "groups over two axes of a run",
    "torch.distributed.tensor.placement_types._StridedShard": "fused weights split by heads",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": (
        "where a rank's slice of a fused weight is in a checkpoint"
    ),
}


def join_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The same ranks as a single axis."""
    return mesh._flatten(name)


def find_offset(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[int, ...]:
    """Where this rank's slice of a split tensor begins, in each dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(start)
