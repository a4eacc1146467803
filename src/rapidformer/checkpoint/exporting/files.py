"""An export's folder: weights, one shard in memory at a time, and what describes them.

The folder appears complete or not at all, and nothing else is overwritten.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rapidformer.checkpoint.exporting.build import Recipes
from rapidformer.checkpoint.exporting.source import Source
from rapidformer.checkpoint.lock import replacing
from rapidformer.checkpoint.publish import read_json
from rapidformer.checkpoint.saving import ORIGIN
from rapidformer.errors import CheckpointError, ConfigurationError, RapidformerError, list_first
from rapidformer.hub import has_tokenizer, quiet_transformers
from rapidformer.log import get_logger

REPORT = "export.json"
"""Lists what an export wrote: only such a folder is ever replaced."""
_INDEX = "model.safetensors.index.json"
_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", ".vocab"}
_GENERATION = "generation_config.json"
# With more templates of the tokenizer, and with what sentence-transformers reads.
_FOLDERS = ("additional_chat_templates", "1_Pooling", "2_Normalize")
# Written by the export itself, or about another folder.
_OTHERS = {"config.json", "adapter_config.json", _INDEX, ORIGIN}
_OTHERS |= {"pytorch_model.bin.index.json", REPORT, "trainer_state.json"}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as it is written: only floating-point numbers are converted."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def write_shards(
    recipes: Recipes, folder: Path, dtype: torch.dtype, max_shard_size: int | str
) -> tuple[int, int]:
    """Write the tensors in this type; returns how many files and bytes they take."""
    weights = recipes.files

    def get_size(tensor: Tensor) -> int:
        is_cast = tensor.is_floating_point()
        return tensor.numel() * (dtype.itemsize if is_cast else tensor.element_size())

    plan = split_state_dict_into_shards_factory(
        weights, get_storage_size=get_size, filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )  # fmt: skip
    for file, names in plan.filename_to_tensors.items():
        shard = {
            name: cast(recipes.read(weights[name]), dtype).contiguous().clone() for name in names
        }
        save_file(shard, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return len(plan.filename_to_tensors), int(plan.metadata["total_size"])


def copy_texts(source: Source, target: Path) -> None:
    """Copy what describes the model; of an adapter without a tokenizer, its base model's."""
    for path in sorted(source.description.iterdir()):
        if path.is_file() and path.suffix in _SUFFIXES and path.name not in _OTHERS:
            shutil.copyfile(path, target / path.name)
    for name in _FOLDERS:
        if (source.description / name).is_dir():
            shutil.copytree(source.description / name, target / name, dirs_exist_ok=True)
    if source.base is not None:
        generation = Path(source.base) / _GENERATION
        if generation.is_file() and not (target / _GENERATION).exists():
            shutil.copyfile(generation, target / _GENERATION)
        if not _has_processor(target):
            _save_processor(source.base, target)
    if not _has_processor(target):
        get_logger().info("tokenizer none was saved with the model: add one to the export yourself")


def _has_processor(folder: Path) -> bool:
    return has_tokenizer(folder) or (folder / "preprocessor_config.json").is_file()


def _save_processor(base: str, target: Path) -> None:
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    processor = load_tokenizer(base) or _load(AutoImageProcessor, base)
    if processor is not None:
        processor.save_pretrained(target)


def load_tokenizer(place: Path | str) -> Any:
    """The tokenizer of a folder, or of a model on the Hub; None if it has none that loads."""
    from transformers import AutoTokenizer

    if Path(place).is_dir() and not has_tokenizer(Path(place)):
        return None  # transformers would build an empty one
    return _load(AutoTokenizer, str(place))


def _load(kind: Any, place: str) -> Any:
    try:
        with quiet_transformers(place):
            return kind.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as reason:  # it has none of this kind, or a bad one
        get_logger().debug("%s of %s: %s", kind.__name__, place, reason)
        return None


def refuse_foreign(target: Path) -> None:
    """Refuse a folder with anything in it that no export wrote."""
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file: choose a folder to export to.")
    if not target.is_dir() or not any(target.iterdir()):
        return
    ours = read_json(target / REPORT, or_nothing=True).get("files")
    known = {REPORT, *(ours if isinstance(ours, list) else ())}
    others = sorted(name for name in list_files(target) if name not in known)
    if ours is None or others:
        shown = list_first(others, 3)
        raise ConfigurationError(
            f"{target} holds files that no export wrote ({shown}): choose another folder."
        )


def list_files(folder: Path) -> Iterator[str]:
    """The names of all files in a folder and below."""
    return (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def staging_for(target: Path) -> Iterator[Path]:
    """A folder to write to; if something fails, nothing is left of it, and the error says why."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(target) as staging:
            yield staging
    except RapidformerError:
        raise
    except (OSError, SafetensorError) as reason:
        text = getattr(reason, "strerror", None) or str(reason).rpartition("I/O error: ")[2]
        raise CheckpointError(
            f"{target} cannot be written: {text}. Nothing was exported."
        ) from None
