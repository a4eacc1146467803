"""Groups and ranks by the names that users' scripts know, and ``broadcast_data``.

    from rapidformer import mpu

Library code uses the topology instead. An axis of size one has a group of one, never None, which
torch's collectives would take for all processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rapidformer.dist.topology import get_topology
from rapidformer.errors import RapidformerError

_MAX_DIMS = 5


Group = dist.ProcessGroup
_alone: tuple[Group, Group] | None = None
"""The group of all processes, and the group of this one alone that was created with it."""


def _build_getters(
    axis: str,
) -> tuple[Callable[[], int], Callable[[], int], Callable[[], Group | None]]:
    def get_world_size() -> int:
        """The number of ranks along this axis of the run."""
        return get_topology().get_size(axis)

    def get_rank() -> int:
        """This rank's index among them."""
        return get_topology().get_rank(axis)

    def get_group() -> Group | None:
        """Their group; None only in a single-process run."""
        return _get_group(axis)

    return get_world_size, get_rank, get_group


# Those that have different rows.
get_data_parallel_world_size, get_data_parallel_rank, get_data_parallel_group = _build_getters(
    "data"
)
# Those that share each layer.
(
    get_tensor_model_parallel_world_size,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_group,
) = _build_getters("tensor")
# The stages of a pipeline.
(
    get_pipeline_model_parallel_world_size,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_group,
) = _build_getters("pipeline")
# Those that share each sequence.
get_context_parallel_world_size, get_context_parallel_rank, get_context_parallel_group = (
    _build_getters("context")
)
# Those that share the experts of a mixture.
(
    get_expert_model_parallel_world_size,
    get_expert_model_parallel_rank,
    get_expert_model_parallel_group,
) = _build_getters("expert")
# Older names.
get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank
get_model_parallel_group = get_tensor_model_parallel_group


def _get_global_rank(axis: str, index: int) -> int:
    """Global rank of a neighbour along an axis, wrapping around."""
    group = _get_group(axis)
    return 0 if group is None else dist.get_global_rank(group, index % dist.get_world_size(group))


# Global ranks: the first of this one's group, and the first and last stage of its pipeline.
get_tensor_model_parallel_src_rank = functools.partial(_get_global_rank, "tensor", 0)
get_data_parallel_src_rank = functools.partial(_get_global_rank, "data", 0)
get_pipeline_model_parallel_first_rank = functools.partial(_get_global_rank, "pipeline", 0)
get_pipeline_model_parallel_last_rank = functools.partial(_get_global_rank, "pipeline", -1)


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage."""
    return _get_global_rank("pipeline", get_pipeline_model_parallel_rank() + 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage."""
    return _get_global_rank("pipeline", get_pipeline_model_parallel_rank() - 1)


def is_pipeline_first_stage() -> bool:
    """Whether this rank holds the first stage."""
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage() -> bool:
    """Whether this rank holds the last stage."""
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def model_parallel_is_initialized() -> bool:
    """Whether groups exist: always, once there is an engine."""
    return True


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Any] | None, datatype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The first tensor-parallel rank's tensors, on all of them: one message of shapes, one more."""
    group = get_tensor_model_parallel_group()
    is_source = group is None or dist.get_rank(group) == 0
    problems = _find_problems(keys, data, datatype) if is_source else []
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    if group is None or dist.get_world_size(group) == 1:
        _refuse(problems)
        assert data is not None
        return {key: data[key].to(device, non_blocking=True) for key in keys}
    source = dist.get_global_rank(group, 0)
    is_idle = not is_source or bool(problems)
    shapes = [] if is_idle or data is None else [tuple(data[key].shape) for key in keys]
    message: list[Any] = [problems, shapes]
    dist.broadcast_object_list(message, src=source, group=group)
    problems, shapes = message
    _refuse(problems)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if is_source:
        assert data is not None
        flat = torch.cat([data[key].to(device).reshape(-1) for key in keys])
    else:
        flat = torch.empty(sum(sizes), dtype=datatype, device=device)
    dist.broadcast(flat, src=source, group=group)
    parts = flat.split(sizes)
    return {key: part.view(shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}


def _get_group(axis: str) -> Group | None:
    global _alone
    group = get_topology().get_group(axis)
    if group is not None or not (dist.is_available() and dist.is_initialized()):
        return group
    world = dist.group.WORLD
    assert world is not None
    if _alone is None or _alone[0] is not world:
        # By this process alone: others may never ask.
        _alone = world, dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _alone[1]


def _find_problems(
    keys: Sequence[str], data: Mapping[str, Any] | None, datatype: torch.dtype
) -> list[str]:
    if data is None:
        return ["the first process of the group has no data."]
    problems = []
    for key in keys:
        value = data.get(key)
        if not isinstance(value, torch.Tensor):
            known = ", ".join(map(str, data))
            problems.append(f"the batch has no tensor {key!r}: it has {known}.")
        elif value.dtype != datatype:
            problems.append(f"{key!r} is {value.dtype}, not {datatype}.")
        elif value.dim() >= _MAX_DIMS:
            problems.append(f"{key!r} has {value.dim()} dimensions, more than {_MAX_DIMS - 1}.")
    return problems


def _refuse(problems: list[str]) -> None:
    if problems:
        raise RapidformerError("broadcast_data: " + " ".join(problems))
