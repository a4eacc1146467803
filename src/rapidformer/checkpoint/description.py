"""What a checkpoint says about its model, so that the model can be built without its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.publish import read_json
from rapidformer.models.adapter_folder import name_config, to_absolute
from rapidformer.models.adapters import find_adapter
from rapidformer.models.location import quiet_transformers

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
    with quiet_transformers(None):
        name_config(model).save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        if hasattr(processor, "save_pretrained"):
            processor.save_pretrained(folder)
        if adapter is not None:
            adapter.config.save_pretrained(str(folder / ADAPTER))
    base = adapter.base if adapter else getattr(model, "name_or_path", None)
    origin = {"model": to_absolute(base), "adapter": adapter.name if adapter else None}
    (folder / ORIGIN).write_text(json.dumps(origin, indent=1), encoding="utf-8")


def read_origin(folder: Path) -> str | None:
    """The folder or Hub name of the model that training started from; None if unknown."""
    model = read_json(folder / ORIGIN, or_nothing=True).get("model")
    return model if isinstance(model, str) and model else None


def read_adapter_name(folder: Path) -> str:
    """What peft calls the adapter, which is part of the names of its weights."""
    return str(read_json(folder / ORIGIN, or_nothing=True).get("adapter") or "default")
