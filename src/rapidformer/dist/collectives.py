"""The few collectives the library needs, as plain functions that work in one process, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rapidformer.dist.regions import gather_in
from rapidformer.dist.topology import Topology
from rapidformer.errors import RapidformerError

T = TypeVar("T")


_is_apart: ContextVar[bool] = ContextVar("is_apart", default=False)


def is_alone() -> bool:
    """Whether there are no other ranks, or this one works ``apart`` from them just now."""
    has_group = dist.is_available() and dist.is_initialized()
    return not has_group or _is_apart.get() or dist.get_world_size() == 1


def is_apart() -> bool:
    """Whether there may be others, which do not take part in what this rank does just now."""
    return _is_apart.get()


@contextmanager
def apart() -> Iterator[None]:
    """Inside, this rank asks no other one: for what it can do by itself, as in one process."""
    token = _is_apart.set(True)
    try:
        yield
    finally:
        _is_apart.reset(token)


def sum_over_replicas(tensor: torch.Tensor, topology: Topology) -> torch.Tensor:
    """Sum in place over all ranks that saw different tokens."""
    return _sum(tensor, topology.get_replica_group())


def sum_over_rows(tensor: torch.Tensor, topology: Topology) -> torch.Tensor:
    """Sum in place over all ranks that saw different rows."""
    return _sum(tensor, topology.get_group("data"))


def max_over_replicas(numbers: list[int], topology: Topology) -> list[int]:
    """The largest of each number over all ranks that saw different tokens; by hosts if they can."""
    group = topology.get_replica_group()
    return numbers if group is None else max_over_all(numbers, group)


def max_over_all(numbers: list[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """The largest of each number over all ranks (of a group); by hosts if they can."""
    if is_alone():
        return numbers
    # A script may have started its processes with NCCL alone, which does not reach host memory.
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    largest = torch.tensor(numbers, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def gather_rows(
    tensor: torch.Tensor, topology: Topology, pad_value: float | None = None
) -> torch.Tensor:
    """Join the rows (dimension 0) of all data-parallel ranks, in rank order.

    Ranks may have different numbers of rows. Other dimensions must agree, unless ``pad_value`` says
    how to fill the shorter ones. A row's gradient is the sum of what all ranks' losses give it.
    """
    group = topology.get_group("data")
    if group is None:
        return tensor
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    has_gradient = rows.requires_grad and torch.is_grad_enabled()
    facts = gather_objects((tuple(rows.shape), has_gradient), topology)
    shapes = [shape for shape, _ in facts]
    widest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    if pad_value is None and any(shape[1:] != widest[1:] for shape in shapes):
        raise RapidformerError(
            f"gather() got tensors of different shapes from the ranks: "
            f"{', '.join(str(list(shape)) for shape in shapes)}. "
            "Pass pad_value= to pad the shorter ones."
        )
    padded = rows.new_full(widest, 0 if pad_value is None else pad_value)
    padded[tuple(slice(size) for size in rows.shape)] = rows
    if any(needs_gradient for _, needs_gradient in facts):
        if not padded.requires_grad:
            padded.requires_grad_()  # the backward pass adds up over all ranks, this one too
        joined = gather_in(padded, 0, len(padded) * len(shapes), group)
        everyone = list(joined.chunk(len(shapes)))
    else:
        everyone = [torch.empty_like(padded) for _ in shapes]
        dist.all_gather(everyone, padded.contiguous(), group=group)
    return torch.cat([part[: shape[0]] for part, shape in zip(everyone, shapes, strict=True)])


def gather_objects(value: T, topology: Topology) -> list[T]:
    """The values of all data-parallel ranks, in rank order, on each of them."""
    return _gather(value, topology.get_group("data"))


def gather_from_stages(value: T, topology: Topology) -> list[T]:
    """The values of all stages of this rank's pipeline; just its own without a pipeline."""
    return _gather(value, topology.get_group("pipeline"))


def gather_from_all(value: T) -> list[T]:
    """The values of all processes of the run, by rank."""
    return _gather(value, None if is_alone() else dist.group.WORLD)


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    if group is None:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def broadcast_object(value: T, group: dist.ProcessGroup | None = None) -> T:
    """The first rank's value, on every rank."""
    if is_alone():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def wait_for_all() -> None:
    """Return once every rank has called this."""
    if not is_alone():
        dist.barrier()


def gather_on_first(value: T, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """The values of all ranks, by rank, on rank 0; None elsewhere."""
    if is_alone():
        return [value]
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, everyone, dst=0, group=group)
    return everyone
