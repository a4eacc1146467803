"""transformers' processors without torchvision, which images do not need.

Only videos do. But transformers does not load a processor whose video part cannot be used, takes
some of Pillow's image processors for torchvision's, and Pixtral's (Mistral 3) imports a function
from a file that needs torchvision, although the file beside it has the same function.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rapidformer.compat.patches import Entry, Patch

PRIVATE_NAMES: dict[str, str] = {}
_AUTO, _PIXTRAL = "transformers.models.auto", "transformers.models.pixtral"


def load_auto_processor(location: str, **options: Any) -> Any:
    """The processor in a folder or on the Hub."""
    from transformers.models.auto.processing_auto import AutoProcessor

    with loading_without_torchvision():
        return AutoProcessor.from_pretrained(location, **options)


def loading_without_torchvision() -> AbstractContextManager[None]:
    """Inside, processors load without torchvision; nothing is changed where it is installed."""
    return nullcontext() if importlib.util.find_spec("torchvision") else _PATCH


def _list_entries() -> Iterable[Entry]:
    from transformers import processing_utils, video_processing_utils

    pillow = importlib.import_module(f"{_PIXTRAL}.image_processing_pil_pixtral")
    with Patch(
        lambda: [Entry(sys.modules, f"{_PIXTRAL}.image_processing_pixtral", lambda _: pillow)]
    ):
        pixtral = importlib.import_module(f"{_PIXTRAL}.processing_pixtral")
    images = importlib.import_module(f"{_AUTO}.image_processing_auto")
    videos = importlib.import_module(f"{_AUTO}.video_processing_auto")
    kind = processing_utils.MODALITY_TO_BASE_CLASS_MAPPING["video_processor"]
    return [
        Entry(processing_utils.transformers_module, kind,
              lambda _: getattr(video_processing_utils, kind)),
        Entry(images, "get_image_processor_class_from_name",
              lambda before: _find_by("image_processing_pil", "imageprocessorpil", before)),
        Entry(videos, "video_processor_class_from_name",
              lambda before: _find_by("video_processing", "videoprocessor", before)),
        Entry(importlib.import_module(_PIXTRAL), "PixtralProcessor",
              lambda _: pixtral.PixtralProcessor),
    ]  # fmt: skip


def _find_by(file: str, ending: str, before: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that also finds classes whose public names need torchvision."""
    from transformers.models.auto.configuration_auto import (
        CONFIG_MAPPING_NAMES,
        model_type_to_module_name,
    )

    def find(name: str) -> Any:
        found = before(name)
        if found is not None and not getattr(found, "is_dummy", False):
            return found
        for folder in map(model_type_to_module_name, CONFIG_MAPPING_NAMES):
            if folder.replace("_", "") + ending == name.lower():
                place = f"transformers.models.{folder}.{file}_{folder}"
                try:
                    return getattr(importlib.import_module(place), name)
                except ModuleNotFoundError as error:
                    if error.name != "torchvision":
                        raise
                    return _build_stand_in(name, place)
        return found

    return find


def _build_stand_in(name: str, place: str) -> type:
    """A video processor with its settings and its name: what is loaded and saved for images."""
    from transformers.video_processing_utils import BaseVideoProcessor

    return type(name, (BaseVideoProcessor,), {"__module__": place})


_PATCH = Patch(_list_entries)
