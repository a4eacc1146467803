"""From what the data flags name to streams: files, patterns, folders and data sets on the Hub.

Training rows are streamed. Validation and test rows are a table: they are read again and again, in
order, and metrics look up what was expected.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from rapidformer.config.task_sections import DataArguments
from rapidformer.data.files import build_table, get_format
from rapidformer.data.folders import get_split_name, load_split
from rapidformer.data.mixture import MixedStream
from rapidformer.data.streams.shards import (
    ColumnShard,
    IterableShard,
    LineShard,
    Shard,
    TableShard,
    drop_compression,
)
from rapidformer.data.streams.stream import StreamRows
from rapidformer.data.streams.tar import TAR, TarShard
from rapidformer.errors import DataError
from rapidformer.hub import suggest_path

_KINDS: dict[str, Any] = {
    "json": LineShard, "text": LineShard, "csv": TableShard, "tsv": TableShard,
    "parquet": ColumnShard, "arrow": ColumnShard,
}  # fmt: skip


def can_stream(path: Path) -> bool:
    """Whether a file has a format that is read as a stream."""
    return path.name.lower().endswith(TAR) or get_format(drop_compression(path)) in _KINDS


def open_stream(
    data: Any, *, shuffle_buffer: int = 0, weights: Sequence[float] | None = None
) -> StreamRows:
    """A stream of what a script has: a path, a pattern, several of them, or an iterable data set.

    With ``weights``, each path is a data set of its own.
    """
    from rapidformer.data.data_source import is_stream

    if isinstance(data, StreamRows):
        return data
    if isinstance(data, (str, Path)):
        data = [data]
    elif is_stream(data):
        return StreamRows(list_shards_of(data, type(data).__name__), buffer=shuffle_buffer)
    texts = [str(path) for path in data]
    sets = [build_shards(expand(text, "data")) for text in texts]
    if weights is None:
        return StreamRows([shard for shards in sets for shard in shards], buffer=shuffle_buffer)
    if len(weights) != len(sets):
        raise DataError(f"{len(weights)} weights for {len(sets)} data sets: give one for each.")
    names = [f"{Path(text).stem}_{number}" for number, text in enumerate(texts, start=1)]
    parts = (StreamRows(shards, buffer=shuffle_buffer) for shards in sets)
    return MixedStream(dict(zip(names, parts, strict=True)), weights)


def expand(text: str, setting: str) -> list[Path]:
    """The files that a path or a pattern names."""
    path, flag = Path(text).expanduser(), "--" + setting.replace("_", "-")
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and can_stream(p))
        if not files:
            raise DataError(f"{flag} {text}: the folder holds no file that can be streamed.")
        return files
    if path.exists():
        if not can_stream(path):
            raise DataError(
                f"{flag} {text} cannot be streamed: use .jsonl, .csv, .tsv, .txt (also with .gz or "
                ".zst), .parquet, .arrow or .tar files."
            )
        return [path]
    if not glob.has_magic(text):
        raise DataError(f"{flag} {text}: no such file or folder.{suggest_path(path)}")
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207
    files = [path for path in found if path.is_file() and can_stream(path)]
    if not files:
        raise DataError(f"{flag} {text}: no file that can be streamed matches this pattern.")
    return files


def build_shards(files: Sequence[Path]) -> list[Shard]:
    """A shard for each file. All tables of text have the columns of the first."""
    shards: list[Any] = []
    kinds = None
    for path in files:
        if path.name.lower().endswith(TAR):
            shards.append(TarShard(path))
            continue
        shard = _KINDS[str(get_format(drop_compression(path)))](path)
        if isinstance(shard, TableShard):
            kinds = kinds or shard.find_kinds()
            shard = replace(shard, kinds=kinds)
        shards.append(shard)
    return shards


def list_shards_of(dataset: Any, name: str) -> list[Shard]:
    """The shards of an iterable data set; one, if it cannot say which it has."""
    count = getattr(dataset, "num_shards", 1) if hasattr(dataset, "shard") else 1
    if count < 2:
        return [IterableShard(dataset, name)]
    parts = (dataset.shard(num_shards=count, index=number) for number in range(count))
    return [IterableShard(part, f"{name}, shard {i}") for i, part in enumerate(parts, 1)]


def split_files(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files to splits by their names or their folders'; all of them train if none says."""
    by_split: dict[str | None, list[Path]] = {}
    for path in files:
        split = get_split_name(path.name.split(".")[0]) or get_split_name(path.parent.name)
        by_split.setdefault(split, []).append(path)
    named = {split: paths for split, paths in by_split.items() if split is not None}
    return named or {"train": list(files)}


def load_table(shards: Sequence[Shard], limit: int | None) -> Any:
    """The rows of shards as a table."""
    paths = [getattr(shard, "path", None) for shard in shards]
    if all(path is not None and get_format(path) for path in paths):
        return load_split([path for path in paths if path is not None], None)
    return build_table(list(islice(iter(StreamRows(shards)), limit)), shards[0].name)


def choose_buffer(args: DataArguments) -> int:
    """Rows of a window; 0 if rows come in their order."""
    return 0 if args.dataloader_type == "single" else int(args.shuffle_buffer)
