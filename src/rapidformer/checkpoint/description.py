"""What a checkpoint says about its model, so that the model can be built without its run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from rapidformer.models.location import quiet_transformers


def describe_model(model: Any, processor: Any, folder: Path) -> None:
    """Write the configuration and the tokenizer of a Hugging Face model, but no weights."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    folder.mkdir()
    named = copy.deepcopy(config)
    named.architectures = [type(model).__name__]
    with quiet_transformers(None):
        named.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        if hasattr(processor, "save_pretrained"):
            processor.save_pretrained(folder)
