"""Put weights on the device, equal on every rank: moved and broadcast, or created in place.

Of a model built without memory, each rank creates its own slice of one parameter at a time. A slice
is not always contiguous: layers are split first and the result is sharded over data-parallel ranks,
so it is found by undoing these steps from the inside out, stretch by stretch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rapidformer.compat.torch_distributed import broadcast_from_first
from rapidformer.compat.torch_modules import get_parameter_table, replace_tensors
from rapidformer.dist.whole import find_strided_axis, get_shard
from rapidformer.errors import ModelError
from rapidformer.models.deferred import DeferredWeights
from rapidformer.models.plan import ModelPlan
from rapidformer.overlay import drop_fact

Stretches = list[tuple[int, int]]


def check_weights(model: nn.Module, deferred: DeferredWeights | None) -> None:
    """Refuse a model that was changed after being built without memory."""
    unknown = [
        name
        for name, parameter in model.named_parameters()
        if (parameter.is_meta if deferred is None else name not in deferred.parameters)
    ]
    if unknown:
        raise ModelError(
            f"{unknown[0]} (and {len(unknown) - 1} more) of {type(model).__name__} cannot be "
            "initialised: the model was changed or wrapped after engine.build_model(). Do all of "
            "it inside: engine.build_model(lambda: get_peft_model(load(...), config))."
        )


def check_gradients(model: nn.Module) -> None:
    """Refuse layers with sparse gradients, which ranks cannot add up."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ModelError(
                f"{name} of {type(model).__name__} has sparse gradients (sparse=True), which "
                "several ranks do not add up: build it without, or train on one rank."
            )


def place_weights(model: nn.Module, device: torch.device, *, offloads: bool) -> None:
    """Move a whole model; if it lives in host memory, move only its buffers."""
    if getattr(model, "is_quantized", False):
        return  # it was created on its device
    if not offloads:
        model.to(device)
        return
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, buffer.to(device))


def broadcast_weights(model: nn.Module) -> None:
    """Give every rank the first one's weights: each may have initialised a new head differently."""
    with torch.no_grad():
        broadcast_from_first([t.data for t in (*model.parameters(), *model.buffers())])


def make_weights(
    model: nn.Module, plan: ModelPlan, deferred: DeferredWeights, device: torch.device
) -> None:
    """Create this rank's slice of every parameter of a split model, in place."""
    _allocate(model, plan, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = get_shard(parameter)
            part = deferred.read(name, find_spans(parameter))
            if part.shape != local.shape:
                raise AssertionError(f"{name}: read {part.shape} for a slice of {local.shape}")
            local.copy_(part)
    drop_fact(model, DeferredWeights)


def find_spans(parameter: Tensor) -> list[Stretches]:
    """Which part of the whole parameter this rank holds."""
    spans: list[Stretches] = [[(0, length)] for length in parameter.shape]
    if not isinstance(parameter, DTensor):
        return spans
    mesh = parameter.device_mesh
    placements: Any = parameter.placements
    strided = find_strided_axis(parameter)
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(placements[axis], "dim", None)
        if dim is not None:
            # Fused matrices are each cut separately.
            parts = placements[axis].split_factor if axis == strided else 1
            spans[dim] = _cut(spans[dim], parts, mesh.get_local_rank(axis), mesh.size(axis))
    return spans


def _cut(stretches: Stretches, parts: int, rank: int, size: int) -> Stretches:
    """A rank's part of the stretches, cut the way ``torch.chunk`` would."""
    width = sum(end - start for start, end in stretches) // parts
    length = -(-width // size)
    first = min(rank * length, width)
    last = min(first + length, width)
    starts = range(0, parts * width, width or 1)
    chosen = [span for start in starts for span in _select(stretches, start + first, start + last)]
    return chosen or [(0, 0)]


def _select(stretches: Stretches, first: int, last: int) -> Stretches:
    """What lies between two positions of the stretches, counted as if they were contiguous."""
    chosen, position = [], 0
    for start, end in stretches:
        length = end - start
        low, high = max(first - position, 0), min(last - position, length)
        if low < high:
            chosen.append((start + low, start + high))
        position += length
    return chosen


def _allocate(model: nn.Module, plan: ModelPlan, device: torch.device) -> None:
    """Give every tensor without memory some, uninitialised, and keep tied ones tied."""
    made: dict[int, Tensor] = {}

    def allocate(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        return made.setdefault(id(tensor), torch.empty_like(tensor, device=device))

    # Like `to_empty`, which fully_shard supports; buffers keep their values.
    replace_tensors(model, allocate)
    for first, *others in plan.tied:
        # Each owner now has its own parameter: tie them again.
        module, _, name = first.rpartition(".")
        parameter = get_parameter_table(model.get_submodule(module))[name]
        for other in others:
            module, _, name = other.rpartition(".")
            get_parameter_table(model.get_submodule(module))[name] = parameter
