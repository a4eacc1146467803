"""An adapter as a folder that plain ``peft`` loads: ``adapter_config.json`` and its weights.

Next to them is the model's ``config.json``: it knows the classes of a head that the base model does
not have.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.errors import ModelError
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

if TYPE_CHECKING:
    from torch import Tensor, nn


def is_adapter_folder(location: str | Path | None) -> bool:
    """Whether this local folder holds an adapter."""
    return location is not None and (Path(location) / CONFIG_FILE).is_file()


def read_base(folder: str | Path) -> str:
    """The folder or Hub name of the model that an adapter belongs to."""
    file = Path(folder) / CONFIG_FILE
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError) as reason:
        raise ModelError(f"{file} is not the configuration of an adapter: {reason}.") from None
    if not base:
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
        found: dict[str, Tensor] = get_peft_model_state_dict(
            model, dict(weights), adapter.name, save_embedding_layers=False
        )
    prefix = "" if adapter.is_prompt else PREFIX
    named = {prefix + name: tensor.detach().clone().contiguous() for name, tensor in found.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = copy.deepcopy(adapter.config)
    config.inference_mode = True
    base = adapter.base
    # A relative path would depend on where the next command runs.
    config.base_model_name_or_path = (
        str(Path(base).resolve()) if base and Path(base).is_dir() else base
    )
    config.save_pretrained(str(folder))
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        described = copy.deepcopy(model.config)
        inner = model.get_base_model() if adapter.is_prompt else model
        described.architectures = [get_own_class(inner).__name__]
        described.save_pretrained(folder)


def load_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """The model with an adapter from a folder, which can be trained on."""
    from peft import PeftConfig, PeftModel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = PeftConfig.from_pretrained(str(folder))
            adapted = PeftModel.from_pretrained(
                model,
                str(folder),
                # peft cannot continue to train learned tokens.
                is_trainable=not config.is_prompt_learning,
                torch_device="cpu",
            )
        except (ValueError, RuntimeError, OSError, KeyError) as reason:
            text = " ".join(str(reason).split())[:300]
            raise ModelError(
                f"The adapter {folder} does not fit {type(model).__name__}: {text}"
            ) from None
    missing = [str(each.message) for each in caught if "missing adapter keys" in str(each.message)]
    if missing:
        raise ModelError(f"The adapter {folder} is incomplete: {missing[0][:300]}")
    call_adapted_layers(adapted)
    return get_inner(adapted)


def wrap(
    model: nn.Module, folder: str | Path, name: str, weights: dict[str, Tensor] | None
) -> nn.Module:
    """The model inside peft's own class, with the adapter that a folder describes.

    ``weights`` are those of the adapter's file; without them it is left as peft initialises it.
    """
    from peft import (
        PeftConfig,
        get_peft_model,
        get_peft_model_state_dict,
        set_peft_model_state_dict,
    )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = PeftConfig.from_pretrained(str(folder))
            config.inference_mode = False
            adapted: nn.Module = get_peft_model(model, config, name)  # type: ignore[arg-type]
            if weights is not None:
                needed = get_peft_model_state_dict(
                    adapted, adapter_name=name, save_embedding_layers=False
                )
                set_peft_model_state_dict(adapted, weights, name)
        except (ValueError, RuntimeError, OSError, KeyError, TypeError) as reason:
            text = " ".join(str(reason).split())[:300]
            raise ModelError(
                f"The adapter {folder} does not fit {type(model).__name__}: {text}"
            ) from None
    missing = sorted(set(needed) - set(weights)) if weights is not None else []
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
