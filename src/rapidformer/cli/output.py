"""Write predictions as they come, and to a file in the format that its name implies.

Until all are there, they are JSON lines in ``FILE.partial``, whose first line identifies the run:
the same command resumes from it after a crash, and ``FILE`` is always complete.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.objective_sections import EmbeddingArguments
from rapidformer.config.task_sections import (
    DataArguments,
    GenerationArguments,
    ModelArguments,
    RunArguments,
)
from rapidformer.errors import ConfigurationError
from rapidformer.models.location import get_model_location
from rapidformer.strict_json import format_json, parse_object

Row = dict[str, Any]
_KEY = "rapidformer_run"
# What predictions depend on; what only changes speed (processes, parallelism, logging) is left out,
# so a run may be resumed on another number of GPUs.
_SECTIONS = (
    RunArguments, ModelArguments, DataArguments, GenerationArguments, EmbeddingArguments,
)  # fmt: skip
_BESIDES = ("load", "mixed_precision", "fp16", "bf16")
_WITHOUT_EFFECT = (
    "input", "output", "config", "local_rank", "data_path", "num_workers", "preprocessing_workers",
    "cache_dir",
)  # fmt: skip


class PartialPredictions:
    """The predictions of an unfinished run."""

    def __init__(self, target: Path, key: str) -> None:
        """``key`` identifies everything that the predictions depend on."""
        self._target = target
        self._path = target.with_name(target.name + ".partial")
        self._key = key

    def resume(self, group_size: int) -> int:
        """The number of rows kept from an earlier run: whole groups only; the rest is dropped."""
        end, kept = 0, 0
        if self._path.exists() and not self._path.is_file():
            raise ConfigurationError(f"{self._path} is not a regular file: remove it.")
        if self._path.is_file():
            with self._path.open("rb") as file:
                for number, line in enumerate(file):
                    row = parse_object(line) if line.endswith(b"\n") else None  # cut off
                    if row is None or (number == 0 and row.get(_KEY) != self._key):
                        break
                    if number % group_size == 0:
                        end, kept = file.tell(), number
        if end == 0:
            header = json.dumps({_KEY: self._key}) + "\n"
            self._path.write_text(header, encoding="utf-8")
        else:
            os.truncate(self._path, end)
        return kept

    def append(self, rows: list[Row]) -> None:
        """Add rows, and flush them to the disk."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(format_lines(rows))
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Write the predictions to their own file."""
        if self._target.suffix.lower() in _OTHER_FORMATS:
            write_predictions(self, self._target)
        else:
            self._copy_lines()
        self._path.unlink()

    def _copy_lines(self) -> None:
        """All but the first, as they are."""
        staging = _name_staging(self._target)
        with self._path.open("rb") as kept, staging.open("wb") as file:
            next(kept)
            shutil.copyfileobj(kept, file)
        staging.replace(self._target)

    def __iter__(self) -> Iterator[Row]:
        with self._path.open(encoding="utf-8") as file:
            next(file)
            for line in file:
                yield json.loads(line)


def write_predictions(rows: Iterable[Row], path: Path) -> None:
    """JSON lines, unless the name ends in .json, .csv, .tsv or .parquet; rows are read twice."""
    kind = path.suffix.lower()
    staging = _name_staging(path)
    if kind == ".parquet":
        _write_parquet(list(rows), staging)
    else:
        with staging.open("w", encoding="utf-8", newline="") as file:
            file.writelines(_FORMATTERS.get(kind, _iterate_lines)(rows))
    staging.replace(path)


def _name_staging(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def format_lines(rows: Iterable[Row]) -> str:
    """One JSON object per line."""
    return "".join(_iterate_lines(rows))


def _iterate_lines(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        yield format_json(row) + "\n"


def _format_document(rows: Iterable[Row]) -> Iterator[str]:
    opening = "[\n"
    for row in rows:
        yield opening + format_json(row)
        opening = ",\n"
    yield "\n]\n" if opening != "[\n" else "[]\n"


class _Line:
    """A file for `csv` that keeps the last line."""

    def write(self, text: str) -> None:
        self.text = text.removesuffix("\r\n") + "\n"


def _format_table(rows: Iterable[Row], separator: str) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    line = _Line()
    # `csv` quotes only the line ends it is given, and a text may contain either.
    writer = csv.DictWriter(line, names, delimiter=separator, lineterminator="\r\n")
    writer.writeheader()
    yield line.text
    for row in rows:
        # Tables cannot hold lists and objects: they are written as JSON.
        nested = {n: format_json(v) for n, v in row.items() if isinstance(v, (list, dict))}
        writer.writerow(row | nested)
        yield line.text


_FORMATTERS: dict[str, Callable[[Iterable[Row]], Iterator[str]]] = {
    ".json": _format_document,
    ".csv": lambda rows: _format_table(rows, ","),
    ".tsv": lambda rows: _format_table(rows, "\t"),
}
_OTHER_FORMATS = (".parquet", *_FORMATTERS)
"""Endings of files that are not JSON lines."""


def _write_parquet(rows: list[Row], path: Path) -> None:
    from rapidformer.data.files import build_table

    build_table(rows, path).to_parquet(str(path))


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
        # Of an object (an image, say) the type: its bytes need not be read to recognise the run.
        digest.update(json.dumps(row, default=lambda value: type(value).__name__).encode())
    return digest.hexdigest()


def _describe_weights(args: Settings) -> list[Any]:
    """Name, size and time of the model's files: a folder may hold another model by now."""
    location = Path(get_model_location(args) or "")
    if not location.is_dir():
        return []
    files = sorted(path for path in location.iterdir() if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
