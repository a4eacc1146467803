"""An adapter as a folder that plain ``peft`` loads: ``adapter_config.json`` and its weights.

Next to them is the model's ``config.json``: it knows the classes of a head that the base model does
not have. An adapter on the Hub is downloaded, and from then on a folder like any other.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.errors import ModelError
from rapidformer.hub import is_hub_reachable, looks_like_path
from rapidformer.models.adapters import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    Adapter,
    call_adapted_layers,
    find_adapter,
    get_inner,
)
from rapidformer.overlay import get_own_class
from rapidformer.strict_json import parse_json

if TYPE_CHECKING:
    from torch import Tensor, nn

# Intermediate checkpoints in subfolders, and the state of other trainers.
_UNUSED = ["*/*", "optimizer*", "scheduler*", "rng_state*", "training_args.bin"]


@functools.cache
def fetch_adapter(name: str, cache_dir: str | None) -> str | None:
    """The local folder of an adapter on the Hub; None if there is no adapter of this name."""
    if looks_like_path(name):
        return None
    from huggingface_hub import hf_hub_download, snapshot_download

    is_offline = not is_hub_reachable()
    try:
        hf_hub_download(name, CONFIG_FILE, cache_dir=cache_dir, local_files_only=is_offline)
    except (OSError, ValueError):
        return None  # a model without adapters, or no such name: loading it will say which
    try:
        return snapshot_download(
            name, cache_dir=cache_dir, local_files_only=is_offline, ignore_patterns=_UNUSED
        )
    except (OSError, ValueError) as reason:
        raise ModelError(f"The adapter {name} cannot be downloaded: {_shorten(reason)}") from None


def _shorten(reason: Exception) -> str:
    return " ".join(str(reason).split())[:300]


def is_adapter_folder(location: str | Path | None) -> bool:
    """Whether this local folder holds an adapter."""
    return location is not None and (Path(location) / CONFIG_FILE).is_file()


def read_base(folder: str | Path) -> str:
    """The folder or Hub name of the model that an adapter belongs to."""
    file = Path(folder) / CONFIG_FILE
    try:
        base = parse_json(file.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as reason:
        raise ModelError(f"{file} is not the configuration of an adapter: {reason}.") from None
    if not isinstance(base, str) or not base:
        raise ModelError(f"{file} does not say which model it adapts (base_model_name_or_path).")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ModelError(
            f"The adapter {folder} belongs to the model {base}, which is no longer there: put it "
            f"back, or change base_model_name_or_path in {file}."
        )
    return str(base)


def save_adapter(model: Any, adapter: Adapter, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapter; ``weights`` are the model's, whole, by name."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained: dict[str, Tensor] = get_peft_model_state_dict(
            model, dict(weights), adapter.name, save_embedding_layers=False
        )
    prefix = "" if adapter.is_prompt else PREFIX
    named = {
        prefix + name: weight.detach().clone().contiguous() for name, weight in trained.items()
    }
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = copy.deepcopy(adapter.config)
    config.inference_mode = True
    config.base_model_name_or_path = to_absolute(adapter.base)
    config.save_pretrained(str(folder))
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        name_config(model).save_pretrained(folder)


def to_absolute(model: str | None) -> str | None:
    """A relative path would depend on where the next command runs; Hub names stay."""
    return str(Path(model).resolve()) if model and Path(model).is_dir() else model or None


def name_config(model: Any) -> Any:
    """A copy of the model's configuration that names the class it was trained as."""
    adapter, config = find_adapter(model), copy.deepcopy(model.config)
    inner = model.get_base_model() if adapter and adapter.is_prompt else model
    config.architectures = [get_own_class(inner).__name__]
    return config


@contextmanager
def _fitting(model: nn.Module, folder: str | Path) -> Iterator[list[warnings.WarningMessage]]:
    """peft's refusals as one sentence; its warnings are collected."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield caught
        except (ValueError, RuntimeError, OSError, KeyError, TypeError) as reason:
            raise ModelError(
                f"The adapter {folder} does not fit {type(model).__name__}: {_shorten(reason)}"
            ) from None


def load_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """The model with an adapter from a folder, which can be trained on."""
    from peft import PeftConfig, PeftModel

    with _fitting(model, folder) as caught:
        # peft cannot continue to train learned tokens.
        is_trainable = not PeftConfig.from_pretrained(str(folder)).is_prompt_learning
        adapted = PeftModel.from_pretrained(
            model, str(folder), is_trainable=is_trainable, torch_device="cpu"
        )
    messages = [str(warning.message) for warning in caught]
    missing = [message for message in messages if "missing adapter keys" in message]
    if missing:
        raise ModelError(f"The adapter {folder} is incomplete: {missing[0][:300]}")
    call_adapted_layers(adapted)
    return get_inner(adapted)


def wrap(
    model: nn.Module, folder: str | Path, name: str, weights: dict[str, Tensor] | None
) -> nn.Module:
    """The model in peft's class, with the adapter of a folder and its ``weights``, if given."""
    import peft

    missing: list[str] = []
    with _fitting(model, folder):
        config = peft.PeftConfig.from_pretrained(str(folder))
        config.inference_mode = False
        adapted: nn.Module = peft.get_peft_model(model, config, name)
        if weights is not None:
            needed = peft.get_peft_model_state_dict(
                adapted, adapter_name=name, save_embedding_layers=False
            )
            missing = sorted(set(needed) - set(weights))
            peft.set_peft_model_state_dict(adapted, weights, name)
    if missing:
        raise ModelError(f"The adapter {folder} is incomplete: it lacks {', '.join(missing[:3])}.")
    return adapted


def replace_adapter(model: nn.Module, folder: str | Path) -> None:
    """Give the adapter of a model the weights of a folder; one without an adapter gets one."""
    inner = get_inner(model)
    adapter = find_adapter(inner)
    if adapter is None:
        load_adapter(inner, folder)
        return
    from peft import load_peft_weights, set_peft_model_state_dict

    try:
        weights = load_peft_weights(str(folder), device="cpu")
    except (OSError, ValueError) as reason:
        raise ModelError(f"The weights of the adapter {folder} cannot be read: {reason}") from None
    if not adapter.is_prompt:
        weights = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
    try:
        result: Any = set_peft_model_state_dict(inner, weights, adapter.name)
    except RuntimeError as reason:
        raise ModelError(f"The adapter {folder} does not fit: {reason}") from None
    if result is not None and result.unexpected_keys:
        raise ModelError(f"The adapter {folder} does not fit: {result.unexpected_keys[0]}")


def list_weights(folder: str | Path) -> set[str]:
    """The names of the weights that an adapter's file has for the model."""
    from peft import load_peft_weights

    names: list[str] = list(load_peft_weights(str(folder), device="cpu"))
    return {name.removeprefix(PREFIX) for name in names}


def find_files(location: str | None, pattern: str) -> str | None:
    """The folder with a model's own files of this name; an adapter's folder may leave them out."""
    if location is None or not is_adapter_folder(location):
        return location
    return location if any(Path(location).glob(pattern)) else read_base(location)
