"""The few collectives that the library needs, each a plain function of a tensor or an object.

All of them also answer in a run of one process, so that no caller asks how many there are.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rapidformer.dist.topology import Topology
from rapidformer.errors import RapidformerError

T = TypeVar("T")


def is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def sum_over_replicas(tensor: torch.Tensor, topology: Topology) -> torch.Tensor:
    """The sum over all processes that have seen other tokens, in place."""
    group = topology.get_replica_group()
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def sum_over_rows(tensor: torch.Tensor, topology: Topology) -> torch.Tensor:
    """The sum over all processes that have seen other rows, in place."""
    group = topology.get_group("data")
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def gather_rows(
    tensor: torch.Tensor, topology: Topology, pad_value: float | None = None
) -> torch.Tensor:
    """Join the rows (dimension 0) of all data-parallel processes, in their order.

    The numbers of rows may differ. Other dimensions must agree, unless ``pad_value`` says what to
    fill the shorter ones with.
    """
    group = topology.get_group("data")
    if group is None:
        return tensor
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    shapes = gather_objects(tuple(rows.shape), topology)
    widest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    if pad_value is None and any(shape[1:] != widest[1:] for shape in shapes):
        raise RapidformerError(
            f"gather() got tensors of other shapes from other processes: "
            f"{', '.join(str(list(shape)) for shape in shapes)}. "
            "Pass pad_value= to fill the shorter ones up."
        )
    padded = rows.new_full(widest, 0 if pad_value is None else pad_value)
    padded[tuple(slice(size) for size in rows.shape)] = rows
    everyone = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather(everyone, padded.contiguous(), group=group)
    return torch.cat([part[: shape[0]] for part, shape in zip(everyone, shapes, strict=True)])


def gather_objects(value: T, topology: Topology) -> list[T]:
    """The values of all data-parallel processes, in their order, on each of them."""
    group = topology.get_group("data")
    if group is None:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def gather_from_stages(value: T, topology: Topology) -> list[T]:
    """The values of all stages of this process's pipeline; its own alone where there is none."""
    group = topology.get_group("pipeline")
    if group is None:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def broadcast_object(value: T) -> T:
    """The first process's value, on every process."""
    if is_alone():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def wait_for_all() -> None:
    """Return when every process has come here."""
    if not is_alone():
        dist.barrier()
