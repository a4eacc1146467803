"""Weights from a folder into a model that exists already: a run's, or a model's own."""

from __future__ import annotations

import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from rapidformer.errors import CheckpointError
from rapidformer.log import get_logger
from rapidformer.models.adapter_folder import fetch_adapter, is_adapter_folder, replace_adapter
from rapidformer.models.adapters import get_inner
from rapidformer.models.weight_names import compare_names
from rapidformer.training.run_folder import BEST, LAST

_LAYERS = re.compile(r"\.(base_layer|modules_to_save\.[^.]+)\.")
"""What peft puts into the name of a layer: one with an adapter, or trained beside it."""
_FILES = ("model.safetensors", "pytorch_model.bin")


def load_weights(model: nn.Module, folder: Path, *, best: bool) -> None:
    """Load every weight by its name, or an adapter (also the Hub's); all must be there and fit."""
    choices = [folder / (BEST if best else LAST), folder]
    adapted: Any = next((path for path in choices if is_adapter_folder(path)), None)
    if not folder.exists():
        adapted = fetch_adapter(str(folder), None)
    if adapted is not None:
        replace_adapter(model, adapted)
        get_logger().info(f"adapter loaded from {adapted}")
        return
    files = (path / name for path in choices for name in _FILES)
    source = folder if folder.is_file() else next(filter(Path.is_file, files), None)
    if source is None:
        raise CheckpointError(
            f"{folder} holds no weights: a run's folder has {LAST}/{_FILES[0]}, a model's "
            f"{' or '.join(_FILES)}."
        )
    model = get_inner(model)
    weights = _put_under_adapter(model, _read(source))
    named = dict(model.named_parameters(remove_duplicate=False))
    stored = {id(named[name]) for name in weights if name in named}  # a tied weight: by any name
    wanted = {
        name: tuple(weight.shape)
        for name, weight in model.state_dict().items()
        if name in weights or id(named.get(name)) not in stored
    }
    saved = {name: tuple(weight.shape) for name, weight in weights.items()}
    differences = compare_names(saved, wanted)
    if differences:
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}:{differences.describe()}"
        )
    model.load_state_dict(weights, strict=False)
    get_logger().info(f"weights loaded from {source}")


def _put_under_adapter(
    model: nn.Module, weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A merged model's weights by the names that they have in one with a LoRA that adds nothing."""
    now = model.state_dict()
    added = [weight for name, weight in now.items() if ".lora_B." in name]
    if not added or any(weight.any() for weight in added):
        return weights
    own = {name: w for name, w in now.items() if ".lora_" in name or ".original_module." in name}
    under = {_LAYERS.sub(".", name): name for name in now if name not in own}
    return {**own, **{under.get(name, name): weight for name, weight in weights.items()}}


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (SafetensorError, OSError, RuntimeError, UnpicklingError, EOFError) as reason:
        cause = next(iter(str(reason).splitlines()), type(reason).__name__)
        raise CheckpointError(f"{path} cannot be read: {cause}") from None
    is_named = isinstance(content, dict) and all(isinstance(n, str) for n in content)
    if not is_named or not all(isinstance(w, torch.Tensor) for w in content.values()):
        raise CheckpointError(f"{path} is not a dictionary of weights by name.")
    return content
