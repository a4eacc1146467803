"""Weights that a checkpoint leaves out: those of a frozen base model that can be loaded again.

In their place the checkpoint has a checksum of each, so that an adapter is never resumed on other
weights. A checksum is the sum of the weight's bits as integers: sums of slices add up to the sum of
the whole, so it does not depend on the layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rapidformer.checkpoint.index import name_dtype
from rapidformer.checkpoint.state import TrainingState
from rapidformer.dist.collectives import gather_from_stages
from rapidformer.dist.topology import Topology
from rapidformer.dist.whole import get_shard
from rapidformer.errors import CheckpointError, list_some

Checksums = dict[str, list[Any]]
"""Name -> data type and sum."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def list_frozen(model: nn.Module) -> frozenset[str]:
    """Every name of every frozen parameter."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


def find_frozen(tensors: Iterable[str], model: nn.Module) -> list[str]:
    """The tensors of a checkpoint that belong to frozen weights, by name."""
    frozen = {f"model.{name}" for name in list_frozen(model)}
    if not getattr(model, "is_quantized", False):
        return [name for name in tensors if name in frozen]
    # The scales of quantized weights are neither parameters nor buffers.
    kinds = (model.named_parameters, model.named_buffers)
    known = {f"model.{name}" for kind in kinds for name, _ in kind(remove_duplicate=False)}
    return [n for n in tensors if n in frozen or (n.startswith("model.") and n not in known)]


def compute_base_checksums(state: TrainingState) -> Checksums:
    """The checksums of all frozen weights; every rank must call this."""
    if state.gathered is None:
        return compute_checksums(state.model, list_frozen(state.model), state.topology)
    return {
        name: compute_checksum(weight)
        for names, weight in state.gathered.iterate_frozen()
        for name in names
    }


def compute_checksums(model: nn.Module, names: Iterable[str], topology: Topology) -> Checksums:
    """The checksums of these parameters on all pipeline stages; every rank must call this."""
    wanted = set(names)
    groups: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, frozen in model.named_parameters(remove_duplicate=False):
        if name in wanted:
            # The mesh axes along which ranks hold different parts of the parameter.
            mesh = getattr(frozen, "device_mesh", None)
            places = enumerate(getattr(frozen, "placements", ()))
            axes = tuple(i for i, kind in places if not kind.is_replicate())
            groups[mesh, axes].append((name, frozen))
    checksums: Checksums = {}
    for (mesh, axes), members in groups.items():
        sums = torch.stack([_sum_bits(parameter) for _, parameter in members])
        for axis in axes:
            dist.all_reduce(sums, group=mesh.get_group(axis))
        for (name, parameter), total in zip(members, sums.tolist(), strict=True):
            checksums[name] = [name_dtype(parameter.dtype), total]
    return {k: v for stage in gather_from_stages(checksums, topology) for k, v in stage.items()}


def compare_checksums(saved: Mapping[str, Any], found: Checksums, base: str | None) -> None:
    """Refuse a base model whose weights are not those that the adapter was trained on."""
    changed = [
        name
        for name, (dtype, total) in found.items()
        if name in saved and saved[name][0] == dtype and saved[name][1] != total
    ]
    if changed:
        raise CheckpointError(
            f"the frozen weights of {base or 'the base model'} are not those that this adapter was "
            f"trained on: {list_some(changed)} differ. Give the model of the first run."
        )


def compute_checksum(weight: Tensor) -> list[Any]:
    """The checksum of one whole weight."""
    return [name_dtype(weight.dtype), int(_sum_bits(weight))]


def _sum_bits(parameter: Tensor) -> Tensor:
    local = get_shard(parameter)
    bits = local.detach().contiguous().view(_INTEGERS[local.element_size()])
    return bits.sum(dtype=torch.int64)
