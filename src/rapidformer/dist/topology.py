"""Which process does what: the axes of a run, and the groups that sums and gathers go over.

Ranks are laid out as Megatron lays them out: tensor-parallel neighbours are next to each other,
then context, then data, and pipeline stages are farthest apart. What a reader would get wrong: a
*replica* is a process that has seen tokens of its own, so losses and gradients are summed over data
and context together; rows of results are gathered over data alone. The expert axis cuts across:
neighbouring replicas share the experts of a mixture, and each of them has its own tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The axes of a run, each with its size; a mesh where there is more than one process."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    sharding: int | None = None
    """Processes that split the state between them; None: all that see other tokens."""
    mesh: DeviceMesh | None = None
    joined: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """Axes that the mesh itself has in two parts."""
    expert_mesh: DeviceMesh | None = None
    """The replicas once more, as groups that hold the same experts by groups that share them."""

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
        return self._get_mesh(axis).get_group()

    def get_submesh(self, axis: str) -> DeviceMesh | None:
        """The same as a mesh of one axis, which DTensors live on."""
        if self.mesh is None or self.get_size(axis) == 1:
            return None
        return self._get_mesh(axis)

    def _get_mesh(self, axis: str) -> DeviceMesh:
        assert self.mesh is not None
        return self.joined[axis] if axis in self.joined else self.mesh[axis]

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
            return self._get_mesh("data")
        if self.data == 1:
            return self.mesh["context"]
        names = tuple(n for n in self.mesh.mesh_dim_names or () if n not in ("pipeline", "tensor"))
        return self.mesh[names]._flatten("replica")

    def get_sharding_mesh(self) -> DeviceMesh | None:
        """Those processes as ``fully_shard`` takes them: with two axes where there are copies."""
        replicas = self.get_replica_mesh()
        if self.mesh is None or self.sharding in (None, self.num_replicas):
            return replicas
        if self.context == 1:
            return self.mesh["copies", "shards"]
        self.mesh["shards", "context"]._flatten("shards_context")
        with warnings.catch_warnings():
            # torch would have joined axes kept by hand, but has no other way to put them together.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.mesh["copies", "shards_context"]

    def get_expert_mesh(self, axis: str) -> DeviceMesh | None:
        """The replicas that share a mixture's experts (``expert``), or that hold the same ones
        (``expert_data``); None where experts are not shared."""
        return None if self.expert_mesh is None else self.expert_mesh[axis]

    def get_replica_group(self) -> dist.ProcessGroup | None:
        """Those processes as a group: what losses and gradients are summed over."""
        mesh = self.get_replica_mesh()
        return None if mesh is None else mesh.get_group()


_current = Topology()


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
    """Make the groups of every axis, on every process, and make them the current ones."""
    global _current
    sizes = {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}
    mesh, joined = None, {}
    if pipeline * data * context * tensor > 1:
        # An axis of one process needs no group; data has one, for what is sent along it.
        axes = {axis: sizes[axis] for axis in AXES if sizes[axis] > 1 or axis == "data"}
        has_copies = sharding not in (None, data * context)
        if has_copies:
            assert sharding is not None
            shards = sharding // context
            axes = _replace_axis(axes, "data", {"copies": data // shards, "shards": shards})
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        if has_copies:
            joined["data"] = mesh["copies", "shards"]._flatten("data")
    expert_mesh = None
    if expert > 1:
        shape = (pipeline, data * context // expert, expert, tensor)
        expert_mesh = init_device_mesh(
            device_type, shape, mesh_dim_names=("outer", "expert_data", "expert", "inner")
        )
    _current = Topology(
        mesh=mesh,
        joined=joined,
        sharding=sharding,
        expert=expert,
        expert_mesh=expert_mesh,
        **sizes,
    )
    return _current


def build_lone_mesh(device_type: str) -> DeviceMesh:
    """A mesh of this process alone, for what needs one though there is nobody to talk to."""
    if not dist.is_initialized():
        backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return init_device_mesh(device_type, (1,), mesh_dim_names=("data",))


def _replace_axis(axes: dict[str, int], name: str, parts: dict[str, int]) -> dict[str, int]:
    """The same axes in the same order, one of them in two."""
    replaced: dict[str, int] = {}
    for axis, size in axes.items():
        replaced |= parts if axis == name else {axis: size}
    return replaced


def get_topology() -> Topology:
    """The current run's: of the process group, of which there is one as well."""
    return _current
