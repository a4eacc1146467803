"""What an export has besides weights: the tokenizer or processor and the generation config."""

from __future__ import annotations

import shutil
from pathlib import Path

from rapidformer.checkpoint.description import ORIGIN
from rapidformer.checkpoint.exporting.source import Source
from rapidformer.log import get_logger
from rapidformer.models.location import has_tokenizer, quiet_transformers

_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", ".vocab"}
_GENERATION = "generation_config.json"
_FOLDERS = ("additional_chat_templates",)
# Written by the export itself, or about another folder.
_OTHERS = {"config.json", "adapter_config.json", "model.safetensors.index.json", ORIGIN}
_OTHERS |= {"pytorch_model.bin.index.json", "export.json", "trainer_state.json"}


def copy_texts(source: Source, target: Path) -> None:
    """Copy what describes the model; of an adapter without a tokenizer, its base model's."""
    for path in sorted(source.description.iterdir()):
        if path.is_file() and path.suffix in _SUFFIXES and path.name not in _OTHERS:
            shutil.copyfile(path, target / path.name)
    for name in _FOLDERS:
        if (source.description / name).is_dir():
            shutil.copytree(source.description / name, target / name, dirs_exist_ok=True)
    if source.base is not None:
        _complete(Path(source.base) / _GENERATION, target / _GENERATION)
        if not _has_processor(target):
            _save_processor(source.base, target)
    if not _has_processor(target):
        get_logger().info("tokenizer none was saved with the model: add one to the export yourself")


def _complete(file: Path, target: Path) -> None:
    if file.is_file() and not target.exists():
        shutil.copyfile(file, target)


def _has_processor(folder: Path) -> bool:
    return has_tokenizer(folder) or (folder / "preprocessor_config.json").is_file()


def _save_processor(base: str, target: Path) -> None:
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    for kind in (AutoTokenizer, AutoImageProcessor):
        if Path(base).is_dir() and kind is AutoTokenizer and not has_tokenizer(Path(base)):
            continue  # transformers would build an empty one
        try:
            with quiet_transformers(base):
                processor = kind.from_pretrained(base)
        except (OSError, ValueError, KeyError) as reason:  # it has none of this kind, or a bad one
            get_logger().debug("%s of %s: %s", kind.__name__, base, reason)
            continue
        processor.save_pretrained(target)
        return
