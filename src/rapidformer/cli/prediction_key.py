"""What identifies the predictions of a command: its rows, model and settings.

Whatever only changes speed is left out (processes, parallelism, logging), so a run may be resumed
on another number of GPUs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.task_sections import (
    DataArguments,
    GenerationArguments,
    ModelArguments,
    RunArguments,
)
from rapidformer.models.location import get_model_location

_SECTIONS = (RunArguments, ModelArguments, DataArguments, GenerationArguments)
_BESIDES = ("load", "mixed_precision", "fp16", "bf16")
_WITHOUT_EFFECT = (
    "input", "output", "config", "local_rank", "data_path", "num_workers", "preprocessing_workers",
    "cache_dir",
)  # fmt: skip


def compute_key(args: Settings, rows: Sequence[Any], batch_size: int) -> str:
    """A hash of everything that the predictions depend on."""
    names = [field.name for section in _SECTIONS for field in dataclasses.fields(section)]
    values = {
        name: getattr(args, name) for name in (*names, *_BESIDES) if name not in _WITHOUT_EFFECT
    }
    digest = hashlib.sha256()
    for part in (values, _describe_weights(args), batch_size, len(rows)):
        digest.update(json.dumps(part, default=str).encode())
    for row in rows:
        digest.update(json.dumps(row, default=_describe_object).encode())
    return digest.hexdigest()


def _describe_weights(args: Settings) -> list[Any]:
    """Name, size and time of the model's files: a folder may hold another model by now."""
    location = Path(get_model_location(args) or "")
    if not location.is_dir():
        return []
    files = sorted(path for path in location.iterdir() if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _describe_object(value: Any) -> str:
    """An image, say: its type, since its bytes need not be read to recognise the run."""
    return type(value).__name__
