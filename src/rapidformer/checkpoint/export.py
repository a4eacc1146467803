"""Export a model as a folder that ``from_pretrained`` loads, joined on rank 0, in one step."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from rapidformer.checkpoint import frozen
from rapidformer.checkpoint.lock import replacing
from rapidformer.checkpoint.state import get_rank
from rapidformer.checkpoint.writing import run_on_first
from rapidformer.compat.patches import variables
from rapidformer.dist.topology import Topology
from rapidformer.dist.whole import join_each, join_whole
from rapidformer.errors import ModelError, list_some
from rapidformer.hub import quiet_transformers
from rapidformer.models.adapter_folder import save_adapter
from rapidformer.models.adapters import Adapter
from rapidformer.models.merging import build_merged
from rapidformer.models.plan import find_plan, find_tied

_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors", "adapter_*",
)  # fmt: skip


def export_model(
    model: nn.Module,
    folder: Path,
    topology: Topology,
    *,
    processor: Any = None,
    weights: dict[str, Any] | None = None,
    adapter: Adapter | None = None,
    merges: bool = False,
) -> Path:
    """Save weights (or the ``adapter``, unless it ``merges``), configuration and tokenizer."""
    ties: list[tuple[str, ...]] = []
    in_memory: frozen.Checksums = {}
    if adapter is not None and merges and adapter.base is not None and weights is None:
        in_memory = frozen.compute_checksums(model, frozen.list_frozen(model), topology)
    only: set[str] | None = None
    if adapter is not None and not (merges and adapter.base is None):
        every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        only = every_name - frozen.list_frozen(model)
    if weights is None and topology.pipeline > 1:
        weights, ties = _gather_stages(model, topology, only)
    elif weights is None:
        weights = gather_weights(model, only)
    whole = weights

    def write() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder) as staging:
            if adapter is not None and not merges:
                save_adapter(model, adapter, whole, staging)
            elif adapter is not None:
                check = functools.partial(_refuse_edited, in_memory, adapter.base)
                merged = build_merged(model, adapter, whole, check)
                _write_model(merged, merged.state_dict(), staging, ())
            else:
                _write_model(model, whole, staging, ties)
            if processor is not None:
                processor.save_pretrained(staging)

    run_on_first(write, folder)
    return folder


def merge_export(source: Path, target: Path) -> None:
    """Move an exported model into a folder; only an earlier model's files are replaced."""
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    for pattern in _WEIGHTS:
        for path in target.glob(pattern):
            if path.relative_to(target) not in files:
                # from_pretrained would load an older model.safetensors instead of new shards.
                path.unlink()
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).replace(target / name)
    shutil.rmtree(source)


def gather_weights(model: nn.Module, names: Set[str] | None = None) -> dict[str, Any]:
    """All weights (or those of ``names``), whole, in rank 0's memory; every rank contributes."""
    weights = list_weights(model, names)
    order = list(weights)
    for index, whole in join_each(weights.values()):
        weights[order[index]] = whole.cpu() if get_rank() == 0 else None
    return weights if get_rank() == 0 else {}


def list_weights(model: nn.Module, names: Set[str] | None = None) -> dict[str, Any]:
    """All weights (or those of ``names``), as this rank has them."""
    weights: dict[str, Any] = get_model_state_dict(model)
    return {name: weight for name, weight in weights.items() if names is None or name in names}


def _gather_stages(
    model: nn.Module, topology: Topology, names: Set[str] | None
) -> tuple[dict[str, Tensor], list[tuple[str, ...]]]:
    """The same for a pipelined model, tensor by tensor, and which names share a parameter."""
    stage_weights = list_weights(model, names)
    group = topology.get_group("pipeline")
    assert group is not None and topology.mesh is not None
    # Weights in host memory travel like those on the device: both ends must use one backend.
    device = torch.device(topology.mesh.device_type)
    weights: dict[str, Tensor] = {}
    ties: list[tuple[str, ...]] = []
    # One rank of each stage speaks for those that share it.
    is_speaker = dist.get_global_rank(group, 0) == 0
    for stage in range(topology.pipeline):
        kinds = [(name, weight.shape, weight.dtype) for name, weight in stage_weights.items()]
        box: list[Any] = [(kinds, find_plan(model).tied)]
        if is_speaker:
            dist.broadcast_object_list(box, group=group, group_src=stage)
            ties += [tie for tie in box[0][1] if tie not in ties]
        if dist.get_rank(group) == stage:
            for name, weight in stage_weights.items():
                # All ranks that share the tensor must join it, whoever needs it.
                whole = join_whole(weight)
                if is_speaker and stage == 0:
                    weights[name] = whole.detach().cpu()
                elif is_speaker:
                    dist.send(whole.detach().to(device).contiguous(), group=group, group_dst=0)
        elif dist.get_rank() == 0:
            for name, shape, dtype in box[0][0]:
                received = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(received, group=group, group_src=stage)
                weights[name] = received.cpu()
    return weights, ties if dist.get_rank() == 0 else []


def _refuse_edited(
    in_memory: frozen.Checksums, base: str | None, in_files: Mapping[str, Tensor]
) -> None:
    """Refuse to merge into a base model's files if the model in memory has other weights."""
    edited = []
    for name, (dtype, total) in in_memory.items():
        weight, kind = in_files.get(name.replace(".base_layer.", ".")), getattr(torch, dtype)
        # Packed weights of a quantized base are not comparable.
        if weight is not None and weight.is_floating_point() and kind.is_floating_point:
            edited += [name] if frozen.compute_checksum(weight.to(kind))[1] != total else []
    if edited:
        raise ModelError(
            f"the frozen weights in memory are not those in {base}, into which the adapter would "
            f"be merged: {list_some(edited)} differ. Save the changed model to a folder and train "
            "on that, or export with merge=False."
        )


def _write_model(
    model: Any, weights: dict[str, Any], folder: Path, ties: Sequence[Sequence[str]]
) -> None:
    if hasattr(model, "save_pretrained"):
        # Names of one parameter share one tensor again, so that it is stored once.
        for first, *others in find_tied(model):
            if first in weights:
                weights |= {name: weights[first] for name in others if name in weights}
        for first, *others in ties:
            weights |= dict.fromkeys(others, weights[first])
        # If DeepSpeed is installed, accelerate imports it here, and it would print to standard
        # output that it found no GPU.
        lacks_gpu = not torch.cuda.is_available()
        on_cpu = variables({"DS_ACCELERATOR": "cpu"}, keeps=True) if lacks_gpu else nullcontext()
        with quiet_transformers(str(folder)), on_cpu:
            model.save_pretrained(folder, state_dict=weights)
        return
    from safetensors.torch import save_file

    # safetensors refuses shared memory: a tied weight is stored under each of its names.
    contiguous = {name: weight.clone().contiguous() for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
