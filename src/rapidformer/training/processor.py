"""Find the tokenizer or image processor of a script's model.

A model saved without it cannot be used for prediction. Scripts have no hook for it, so we look in
the template, in the collate function, and where the model was loaded from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rapidformer.errors import ModelError
from rapidformer.models.location import check_has_tokenizer, quiet_transformers

_NAMES = ("processor", "processing_class", "tokenizer", "image_processor")


def find_processor(template: Any, collate: Any, model: Any) -> Any | None:
    """Something with ``save_pretrained`` that belongs to the model; None if there is none."""
    for owner in (template, collate, getattr(collate, "__self__", None)):
        for name in _NAMES:
            processor = getattr(owner, name, None)
            if hasattr(processor, "save_pretrained"):
                return processor
    return _load_from_source(str(getattr(model, "name_or_path", "") or ""))


def _load_from_source(location: str) -> Any | None:
    """The tokenizer stored with the weights that the model was loaded from."""
    if not location:
        return None
    from transformers import AutoTokenizer

    try:
        if Path(location).is_dir():
            check_has_tokenizer(location)
        with quiet_transformers(location):
            return AutoTokenizer.from_pretrained(location, local_files_only=True)
    except (ModelError, OSError, ValueError, KeyError, ImportError):
        return None  # the model has none and needs none
