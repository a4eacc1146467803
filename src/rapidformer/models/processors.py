"""Load the processors of models that read images: a tokenizer and an image processor in one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from rapidformer.compat.transformers_processors import load_auto_processor
from rapidformer.config import Settings
from rapidformer.errors import MissingPackageError, ModelError
from rapidformer.hub import quiet_transformers
from rapidformer.models.adapter_folder import find_files
from rapidformer.models.location import (
    check_folder,
    check_has_tokenizer,
    explain_failure,
    get_hub_options,
    get_model_location,
)


def load_processor(args: Settings) -> Any:
    """The processor of the model, with a padding token."""
    if find_spec("PIL") is None:
        raise MissingPackageError("pillow", "images", "image")
    location = find_files(get_model_location(args), "*processor_config.json")
    if location is None:
        raise ModelError(
            "There is no processor for images: give a folder or a Hub name that has one with "
            "--pretrained-model-name-or-path."
        )
    check_folder(location)
    check_has_tokenizer(location)
    with quiet_transformers(location), explain_failure(location, "processor"):
        processor = load_auto_processor(location, **get_hub_options(location, args))
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None or not hasattr(processor, "image_processor"):
        raise ModelError(
            f"{location} has no processor for images and text (processor_config.json), only a "
            f"{type(processor).__name__}: choose a model that reads images."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return processor
