"""Weights from a folder into a model that exists already: a run's, or a model's own."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from rapidformer.errors import CheckpointError
from rapidformer.log import get_logger
from rapidformer.models.adapter_folder import is_adapter_folder, replace_adapter
from rapidformer.training.run_folder import BEST, LAST

_FILE = "model.safetensors"


def load_weights(model: nn.Module, folder: Path, *, best: bool) -> None:
    """Load every weight by its name; one that is missing or of another shape is an error."""
    choices = [folder / (BEST if best else LAST), folder]
    adapted = next((path for path in choices if is_adapter_folder(path)), None)
    if adapted is not None:
        replace_adapter(model, adapted)
        get_logger().info(f"adapter loaded from {adapted}")
        return
    source = next((path / _FILE for path in choices if (path / _FILE).is_file()), None)
    if source is None:
        raise CheckpointError(
            f"{folder} holds no weights: a run's folder has {LAST}/{_FILE}, a model's {_FILE}. "
            "Load weights in another format (pytorch_model.bin) into the model yourself."
        )
    weights = load_file(source)
    missing, unknown = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not _is_tied(model, name, weights)]
    if missing or unknown:
        first = [*missing, *unknown][0]
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}: {len(missing)} weights are missing and "
            f"{len(unknown)} unknown, {first} among them."
        )
    get_logger().info(f"weights loaded from {source}")


def _is_tied(model: nn.Module, name: str, weights: dict[str, torch.Tensor]) -> bool:
    """Whether the weight is stored under another of its names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return any(named.get(other) is named.get(name) for other in weights if other in named)
