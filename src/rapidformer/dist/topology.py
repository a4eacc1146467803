"""Which process does what: the axes of a run, and the groups that sums and gathers go over.

Ranks are laid out as Megatron lays them out: tensor-parallel neighbours are next to each other,
then context, then data, and pipeline stages are farthest apart. What a reader would get wrong: a
*replica* is a process that has seen tokens of its own, so losses and gradients are summed over data
and context together; rows of results are gathered over data alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The axes of a run, each with its size; a mesh where there is more than one process."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    mesh: DeviceMesh | None = None

    def get_size(self, axis: str) -> int:
        """How many processes there are along an axis."""
        return int(getattr(self, axis))

    def get_rank(self, axis: str) -> int:
        """Which of them this one is."""
        group = self.get_group(axis)
        return 0 if group is None else dist.get_rank(group)

    def get_group(self, axis: str) -> dist.ProcessGroup | None:
        """This process and its neighbours along an axis; None where it has none."""
        if self.mesh is None or self.get_size(axis) == 1:
            return None
        return self.mesh.get_group(axis)

    def get_submesh(self, axis: str) -> DeviceMesh | None:
        """The same as a mesh of one axis, which DTensors live on."""
        if self.mesh is None or self.get_size(axis) == 1:
            return None
        return self.mesh[axis]

    @property
    def is_first_process(self) -> bool:
        """Whether this process speaks for all of them."""
        return self.mesh is None or dist.get_rank() == 0

    @property
    def num_replicas(self) -> int:
        """Processes that each see other tokens."""
        return self.data * self.context

    def get_replica_mesh(self) -> DeviceMesh | None:
        """Those processes as a mesh of one axis: what weights are split over."""
        if self.mesh is None or self.num_replicas == 1:
            return None
        if self.context == 1:
            return self.mesh["data"]
        if self.data == 1:
            return self.mesh["context"]
        return self.mesh["data", "context"]._flatten("replica")

    def get_replica_group(self) -> dist.ProcessGroup | None:
        """Those processes as a group: what losses and gradients are summed over."""
        mesh = self.get_replica_mesh()
        return None if mesh is None else mesh.get_group()


_current = Topology()


def build_topology(
    device_type: str, *, pipeline: int = 1, data: int = 1, context: int = 1, tensor: int = 1
) -> Topology:
    """Make the groups of every axis, on every process, and make them the current ones."""
    global _current
    sizes = {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}
    mesh = None
    if pipeline * data * context * tensor > 1:
        # An axis of one process needs no group; data has one, for what is sent along it.
        names = [axis for axis in AXES if sizes[axis] > 1 or axis == "data"]
        shape = tuple(sizes[axis] for axis in names)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=tuple(names))
    _current = Topology(mesh=mesh, **sizes)
    return _current


def get_topology() -> Topology:
    """The current run's: of the process group, of which there is one as well."""
    return _current
