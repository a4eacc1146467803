"""Which rank does what: the axes of a run, and the groups for reductions and gathers.

Tensor-parallel neighbours are adjacent, then context, then data; stages are farthest apart.
A *replica* is a rank that sees its own tokens: losses and gradients are summed over data and
context together, while rows of results are gathered over data only. The expert axis cuts across:
neighbouring replicas share the experts of a mixture, and each of them has its own tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rapidformer.compat.torch_distributed import join_axes

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The axes of a run with their sizes, and a mesh if there is more than one process."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    sharding: int | None = None
    """Ranks that shard the state among themselves; None: all that see different tokens."""
    mesh: DeviceMesh | None = None
    joined: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """Axes that the mesh itself has in two parts."""
    expert_mesh: DeviceMesh | None = None
    """The replicas again, as groups that hold the same experts, times groups that share them."""

    def describe(self) -> dict[str, int]:
        """The size of each axis."""
        return {axis: self.get_size(axis) for axis in AXES}

    def get_size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        return int(getattr(self, axis))

    def get_rank(self, axis: str) -> int:
        """This rank's index along an axis."""
        group = self.get_group(axis)
        return 0 if group is None else dist.get_rank(group)

    def get_group(self, axis: str) -> dist.ProcessGroup | None:
        """The group of this rank's neighbours along an axis; None without neighbours."""
        mesh = self.get_submesh(axis)
        return None if mesh is None else mesh.get_group()

    def get_submesh(self, axis: str) -> DeviceMesh | None:
        """The same as a one-dimensional mesh, for DTensors."""
        if self.mesh is None or self.get_size(axis) == 1:
            return None
        if axis == "expert":
            return self.get_expert_mesh(axis)
        return self.joined[axis] if axis in self.joined else self.mesh[axis]

    @property
    def is_first_process(self) -> bool:
        """Whether this is rank 0."""
        return self.mesh is None or dist.get_rank() == 0

    @property
    def num_replicas(self) -> int:
        """Number of ranks that see different tokens."""
        return self.data * self.context

    def get_replica_mesh(self) -> DeviceMesh | None:
        """Those ranks as a one-dimensional mesh: what weights are sharded over."""
        if self.mesh is None or self.num_replicas == 1:
            return None
        if self.context == 1:
            return self.get_submesh("data")
        if self.data == 1:
            return self.mesh["context"]
        names = tuple(n for n in self.mesh.mesh_dim_names or () if n not in ("pipeline", "tensor"))
        return join_axes(self.mesh[names], "replica")

    def get_sharding_mesh(self) -> DeviceMesh | None:
        """Those ranks as ``fully_shard`` takes them: two-dimensional with hybrid sharding."""
        replicas = self.get_replica_mesh()
        if self.mesh is None or self.sharding in (None, self.num_replicas):
            return replicas
        if self.context == 1:
            return self.mesh["copies", "shards"]
        join_axes(self.mesh["shards", "context"], "shards_context")
        with warnings.catch_warnings():
            # torch wants flattened axes to be created by hand, but cannot combine these otherwise.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.mesh["copies", "shards_context"]

    def get_expert_mesh(self, axis: str) -> DeviceMesh | None:
        """The replicas that share a mixture's experts (``expert``), or that hold the same ones
        (``expert_data``); None if experts are not split.
        """
        return None if self.expert_mesh is None else self.expert_mesh[axis]

    def get_replica_group(self) -> dist.ProcessGroup | None:
        """Those ranks as a group: what losses and gradients are summed over."""
        mesh = self.get_replica_mesh()
        return None if mesh is None else mesh.get_group()


_current = Topology()
_built: dict[tuple[Any, ...], Topology] = {}
"""By process group, device and sizes: an engine that follows another meets the same groups."""


def build_topology(
    device_type: str,
    *,
    pipeline: int = 1,
    data: int = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
    sharding: int | None = None,
) -> Topology:
    """Make the groups of every axis current; created once, since torch caches a mesh's plans."""
    global _current
    sizes = {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}
    key = (dist.group.WORLD, device_type, *sizes.values(), expert, sharding)
    if key in _built:
        _current = _built[key]
        return _current
    mesh, joined = None, {}
    if pipeline * data * context * tensor > 1:
        # An axis of size one needs no group; data always has one, for what is sent along it.
        axes = {axis: sizes[axis] for axis in AXES if sizes[axis] > 1 or axis == "data"}
        has_copies = sharding not in (None, data * context)
        if has_copies:
            assert sharding is not None
            shards = sharding // context
            parts = {"copies": data // shards, "shards": shards}
            split = [parts if axis == "data" else {axis: axes[axis]} for axis in axes]
            axes = {axis: size for part in split for axis, size in part.items()}
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        if has_copies:
            joined["data"] = join_axes(mesh["copies", "shards"], "data")
    expert_mesh = None
    if expert > 1:
        shape = (pipeline, data * context // expert, expert, tensor)
        names = ("outer", "expert_data", "expert", "inner")
        expert_mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    _current = _built[key] = Topology(
        mesh=mesh, joined=joined, sharding=sharding, expert=expert, expert_mesh=expert_mesh, **sizes
    )
    return _current


def start_lone_group(device_type: str) -> None:
    """A group of this process alone, for code that needs one although there are no peers."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def build_lone_mesh(device_type: str) -> DeviceMesh:
    """The same as a mesh."""
    start_lone_group(device_type)
    return init_device_mesh(device_type, (1,), mesh_dim_names=("data",))


def get_topology() -> Topology:
    """The topology of the current run; there is one, as there is one process group."""
    return _current
