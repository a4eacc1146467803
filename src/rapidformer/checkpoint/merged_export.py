"""Export a saved model as one folder: an adapter is merged into its base model's weights."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.publish import publish, start_staging
from rapidformer.errors import ModelError
from rapidformer.log import get_logger
from rapidformer.models.adapter_folder import is_adapter_folder
from rapidformer.models.adapters import find_adapter
from rapidformer.models.build import build_pretrained, load_image_processor, load_tokenizer
from rapidformer.models.configuration import load_config
from rapidformer.models.location import get_model_location, quiet_transformers
from rapidformer.models.merging import build_merged


def export_merged(args: Any, target: Path) -> None:
    """Write the model that the settings name; ``target`` appears only when it is complete."""
    location = str(get_model_location(args))
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = start_staging(target)
    if is_adapter_folder(location):
        model: Any = build_pretrained(_find_class(args), args)
        adapter = find_adapter(model)
        assert adapter is not None
        model = build_merged(model, adapter, model.state_dict())
        with quiet_transformers(location):
            model.save_pretrained(staging)
        _save_processor(args, staging)
        what = "base model and adapter merged"
    else:
        shutil.copytree(location, staging, dirs_exist_ok=True)
        what = "copied: it has no adapter"
    publish(target, with_manifest=False)
    get_logger().info("exported %s to %s (%s)", location, target, what)


def _find_class(args: Any) -> str:
    """The class that was trained, as transformers names it."""
    import transformers

    name = next(iter(load_config(args).architectures or ()), "")
    return name if hasattr(transformers, name) else "AutoModelForCausalLM"


def _save_processor(args: Any, folder: Path) -> None:
    for load in (load_tokenizer, load_image_processor):
        with contextlib.suppress(ModelError):
            load(args).save_pretrained(folder)
            return
