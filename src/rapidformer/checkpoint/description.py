"""What a checkpoint says about its model, so that the model can be built without its run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.publish import read_json
from rapidformer.errors import CheckpointError
from rapidformer.models.adapters import find_adapter
from rapidformer.models.location import quiet_transformers
from rapidformer.overlay import get_own_class

ADAPTER = "adapter"
"""The folder with the configuration of the model's adapter."""
ORIGIN = "origin.json"
"""Which model training started from, and what peft calls the adapter."""


def describe_model(model: Any, processor: Any, folder: Path) -> None:
    """Write the configuration and the tokenizer of a Hugging Face model, but no weights."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    folder.mkdir()
    adapter = find_adapter(model)
    inner = model.get_base_model() if adapter and adapter.is_prompt else model
    named = copy.deepcopy(config)
    named.architectures = [get_own_class(inner).__name__]
    with quiet_transformers(None):
        named.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        if hasattr(processor, "save_pretrained"):
            processor.save_pretrained(folder)
        if adapter is not None:
            adapter.config.save_pretrained(str(folder / ADAPTER))
    origin = {
        "model": _locate(adapter.base if adapter else getattr(inner, "name_or_path", None)),
        "adapter": adapter.name if adapter else None,
    }
    (folder / ORIGIN).write_text(json.dumps(origin, indent=1), encoding="utf-8")


def read_origin(folder: Path) -> str | None:
    """The folder or Hub name of the model that training started from; None if unknown."""
    model = _read(folder).get("model")
    return model if isinstance(model, str) and model else None


def read_adapter_name(folder: Path) -> str:
    """What peft calls the adapter, which is part of the names of its weights."""
    return str(_read(folder).get("adapter") or "default")


def _read(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / ORIGIN)
    except CheckpointError:
        return {}


def _locate(model: str | None) -> str | None:
    # A relative path would depend on where the next command runs.
    return str(Path(model).resolve()) if model and Path(model).is_dir() else model or None
