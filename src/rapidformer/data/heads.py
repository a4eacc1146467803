"""The first rows of the data, by the standard library alone: a wrong path is found at once."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
from collections.abc import Iterator, Mapping
from glob import has_magic
from pathlib import Path
from typing import Any

from rapidformer.config.task_sections import DataArguments
from rapidformer.data.files import (
    check_file,
    get_format,
    get_table_dialect,
    open_text,
    parse_json_lines,
)
from rapidformer.data.folders import describe_no_data, get_split_name, list_data_files
from rapidformer.data.sources import (
    SPLITS_BY_FLAG,
    as_list,
    check_exists,
    find_sub_folder,
    is_hub_name,
)
from rapidformer.errors import DataError

Rows = list[dict[str, Any]]
_ROWS = 5
_FILES = 20
_CHARACTERS = 1 << 20


def read_heads(args: DataArguments, problems: list[str]) -> dict[Path, Rows]:
    """The first rows of each file of the first split; paths that are missing go to ``problems``."""
    files = list(_find_files(args, problems))
    for split in (*SPLITS_BY_FLAG.values(), None):
        if paths := [path for name, path in files if name == split]:
            heads = {}
            for path in paths[:_FILES]:
                with _collect(problems):
                    heads[path] = _read_rows(path)
            return heads
    return {}


def keep_rows(data: Any) -> Any:
    """The same data with lists instead of DataFrames, and of iterators, which are read once."""
    if isinstance(data, Mapping):
        kept = {split: keep_rows(rows) for split, rows in data.items()}
        return data if all(kept[split] is rows for split, rows in data.items()) else kept
    if hasattr(data, "to_dicts"):  # polars
        return data.to_dicts()
    if hasattr(data, "iterrows"):  # pandas; its missing values are NaN
        return _as_plain(data.astype(object).where(data.notna(), None).to_dict("records"))
    return list(data) if isinstance(data, Iterator) else data


def _as_plain(value: Any) -> Any:
    """With lists for arrays, which is what pandas makes of a parquet file's lists."""
    if isinstance(value, dict):
        return {name: _as_plain(item) for name, item in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_as_plain(item) for item in value] if isinstance(value, list) else value


def take_head(data: Any, split: str) -> list[Any]:
    """The first rows of data in memory; of a dictionary of splits, those of one split."""
    if isinstance(data, Mapping):
        data = next((rows for name, rows in data.items() if get_split_name(name) == split), ())
    return list(itertools.islice(data, _ROWS))


def _find_files(args: DataArguments, problems: list[str]) -> Iterator[tuple[str | None, Path]]:
    location = as_list(args.data_path or args.data_dir)
    if args.streaming:
        yield from _find_shards(args, location, problems)
        return
    if len(location) == 1 and is_hub_name(location[0]):
        location = []
    for text in location:
        with _collect(problems):
            path = check_exists(text, "data_path")
            is_folder = path.is_dir()
            files = list_data_files(find_sub_folder(path, args.data_name)) if is_folder else [path]
            if is_folder and not any(path.iterdir()):
                raise DataError(describe_no_data(path))
            for file in files:
                check_file(file)
                yield get_split_name(file.name.split(".")[0]), file
    for name, split in SPLITS_BY_FLAG.items():
        for text in as_list(getattr(args, name)):
            with _collect(problems):
                path = check_exists(text, name)
                if path.is_file():
                    check_file(path)
                    yield split, path


def _find_shards(
    args: DataArguments, location: list[str], problems: list[str]
) -> Iterator[tuple[str | None, Path]]:
    """The same for the files of a stream."""
    from rapidformer.data.streams.listing import expand, split_files

    for text in (text for text in location if has_magic(text) or not is_hub_name(text)):
        with _collect(problems):
            for split, files in split_files(expand(text, "data_path")).items():
                yield from ((split, file) for file in files)
    for name, split in SPLITS_BY_FLAG.items():
        for text in as_list(getattr(args, name)):
            with _collect(problems):
                yield from ((split, file) for file in expand(text, name))


@contextlib.contextmanager
def _collect(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        problems.append(str(error))


def _read_rows(path: Path) -> Rows:
    readers = {"json": _read_json, "csv": _read_table, "tsv": _read_table, "text": _read_text}
    read = readers.get(str(get_format(path)))
    if read is None:
        return []
    try:
        with open_text(path) as file:
            rows = read(file, path)
    except (OSError, ValueError, AttributeError, RecursionError, EOFError, csv.Error):
        return []  # whoever reads the file says what is wrong with it, by its line
    return [row for row in rows if isinstance(row, dict)]


def _read_json(file: Any, path: Path) -> list[Any]:
    text = file.read(_CHARACTERS)
    lines = text.split("\n")[: -1 if len(text) == _CHARACTERS else None]  # the last may be cut
    text = text.lstrip()
    decoder = json.JSONDecoder()
    if text.startswith("["):
        row, _ = decoder.raw_decode(text[1:].lstrip())
        return [row]
    first, *more = [line.strip() for line in lines if line.strip()][:2] or [""]
    if more and first.startswith("{") and first.endswith("}"):
        return list(itertools.islice(parse_json_lines(lines, path), _ROWS))
    row, _ = decoder.raw_decode(text)
    return [] if isinstance(row.get("data"), list) else [row]


def _read_table(file: Any, path: Path) -> list[Any]:
    reader = csv.DictReader(file, **get_table_dialect(path))
    rows = list(itertools.islice(reader, _ROWS))
    if any(None in row for row in rows):  # more cells than columns
        return []
    return rows or ([dict.fromkeys(reader.fieldnames)] if reader.fieldnames else [])


def _read_text(file: Any, path: Path) -> list[Any]:
    return [{"text": line} for line in itertools.islice(file, _ROWS)]
