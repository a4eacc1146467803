"""Write a model's weights as safetensors files, one shard in memory at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor

from rapidformer.checkpoint.exporting.build import Recipes

_PATTERN = "model{suffix}.safetensors"
_INDEX = "model.safetensors.index.json"


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as it is written: only floating-point numbers are converted."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def write_shards(
    recipes: Recipes, folder: Path, dtype: torch.dtype, max_shard_size: int | str
) -> tuple[int, int]:
    """Write the tensors in this type; returns how many files and bytes they take."""
    weights = recipes.files

    def get_size(tensor: Tensor) -> int:
        each = dtype.itemsize if tensor.is_floating_point() else tensor.element_size()
        return tensor.numel() * each

    plan = split_state_dict_into_shards_factory(
        weights,
        get_storage_size=get_size,
        filename_pattern=_PATTERN,
        max_shard_size=max_shard_size,
    )
    for file, names in plan.filename_to_tensors.items():
        shard = {
            name: cast(recipes.read(weights[name]), dtype).contiguous().clone() for name in names
        }
        save_file(shard, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return len(plan.filename_to_tensors), int(plan.metadata["total_size"])
