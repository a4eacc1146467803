"""Export a model as a Hugging Face folder that ``from_pretrained`` loads, whatever it was trained
on.

Split weights are joined on rank 0; the folder replaces an older one in one step.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from rapidformer.checkpoint.first_rank import run_on_first
from rapidformer.checkpoint.frozen import (
    Checksums,
    compute_checksum,
    compute_checksums,
    list_frozen,
)
from rapidformer.checkpoint.publish import publish, start_staging
from rapidformer.checkpoint.stages import gather_stages
from rapidformer.dist.topology import Topology
from rapidformer.dist.whole import join_whole
from rapidformer.errors import ModelError
from rapidformer.models.adapter_folder import save_adapter
from rapidformer.models.adapters import Adapter
from rapidformer.models.location import quiet_transformers
from rapidformer.models.merging import build_merged

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
    """Save weights, configuration and tokenizer; every rank must call this.

    ``weights`` is given if only the strategy that split them can join them. Of a model with an
    ``adapter``, only the adapter is saved, unless it ``merges`` into the weights under it.
    """
    ties: list[tuple[str, ...]] = []
    in_memory: Checksums = {}
    if adapter is not None and merges and adapter.base is not None and weights is None:
        in_memory = compute_checksums(model, list_frozen(model), topology)
    needs_all = adapter is None or (merges and adapter.base is None)
    only = None if needs_all else _list_trained(model)
    if weights is None and topology.pipeline > 1:
        weights, ties = gather_stages(model, topology, only)
    elif weights is None:
        weights = gather_weights(model, only)
    whole = weights

    def write() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = start_staging(folder)
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
        publish(folder, with_manifest=False)

    run_on_first(write, folder, is_main=not dist.is_initialized() or dist.get_rank() == 0)
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
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    weights: dict[str, Any] = {}
    parts: dict[str, Any] = get_model_state_dict(model)
    for name, tensor in parts.items():
        if names is not None and name not in names:
            continue
        whole = join_whole(tensor)
        if is_first:
            weights[name] = whole.cpu()
    return weights


def _refuse_edited(
    in_memory: Checksums, base: str | None, in_files: Mapping[str, torch.Tensor]
) -> None:
    """Refuse to merge into a base model's files if the model in memory has other weights."""
    edited = []
    for name, (dtype, total) in in_memory.items():
        weight, kind = in_files.get(name.replace(".base_layer.", ".")), getattr(torch, dtype)
        # Packed weights of a quantized base are not comparable.
        if weight is not None and weight.is_floating_point() and kind.is_floating_point:
            edited += [name] if compute_checksum(weight.to(kind))[1] != total else []
    if edited:
        raise ModelError(
            f"the frozen weights in memory are not those in {base}, into which the adapter would "
            f"be merged: {', '.join(edited[:3])}"
            + (f" and {len(edited) - 3} more differ" if edited[3:] else " differ")
            + ". Save the changed model to a folder and train on that, or export with merge=False."
        )


def _list_trained(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - list_frozen(model)


def _write_model(
    model: Any, weights: dict[str, Any], folder: Path, ties: Sequence[Sequence[str]]
) -> None:
    if hasattr(model, "save_pretrained"):
        weights = _restore_ties(model, weights)
        for first, *others in ties:
            weights |= dict.fromkeys(others, weights[first])
        if not torch.cuda.is_available():
            # If DeepSpeed is installed, accelerate imports it here, and it would print to standard
            # output that it found no GPU.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        with quiet_transformers(str(folder)):
            model.save_pretrained(folder, state_dict=weights)
        return
    from safetensors.torch import save_file

    # safetensors refuses shared memory: a tied weight is stored under each of its names.
    contiguous = {name: weight.clone().contiguous() for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def _restore_ties(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Let names of one parameter share one tensor again, so that it is stored once."""
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(id(parameter), name)
        if name in weights and first in weights:
            weights[name] = weights[first]
    return weights
