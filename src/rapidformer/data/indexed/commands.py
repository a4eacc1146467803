"""What ``rapidformer data info`` and ``rapidformer data merge`` do: whole pairs of files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rapidformer.data.indexed.layout import (
    HEADER,
    IndexedDataError,
    get_data_path,
    get_index_path,
    is_file,
    name_target,
    strip_ending,
)
from rapidformer.data.indexed.reader import IndexedDataset
from rapidformer.data.indexed.writer import IndexedWriter
from rapidformer.errors import list_first


def describe_indexed(prefix: str | Path) -> dict[str, Any]:
    """Counts, types, bytes and lengths of a pair, fully checked; or its ``damage``, as reasons."""
    stem = strip_ending(prefix)
    data, index = get_data_path(stem), get_index_path(stem)
    facts: dict[str, Any] = {
        "prefix": stem,
        "bin_bytes": data.stat().st_size if is_file(data) else None,
        "idx_bytes": index.stat().st_size if is_file(index) else None,
        "damage": [],
    }
    try:
        dataset = IndexedDataset(stem)
        dataset.check()
    except IndexedDataError as error:
        return facts | {"damage": error.problems}
    ends = np.append(0, np.cumsum(dataset.sizes, dtype=np.int64))
    return facts | {
        "format": dataset.format,
        "documents": dataset.num_documents,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "multimodal": dataset.modes is not None,
        "document_length": _describe_lengths(np.diff(ends[dataset.doc_idx])),
        "sequence_length": _describe_lengths(dataset.sizes),
    }


def _describe_lengths(lengths: np.ndarray) -> dict[str, float] | None:
    if lengths.size == 0:
        return None
    return {
        "min": int(lengths.min()),
        "mean": round(float(lengths.mean()), 2),
        "median": float(np.median(lengths)),
        "max": int(lengths.max()),
    }


def merge_indexed(prefixes: Iterable[str | Path], output_prefix: str | Path) -> None:
    """Write the sequences and documents of all pairs, also older ones, as one mmap pair."""
    names = [strip_ending(prefix) for prefix in prefixes]
    if not names:
        raise IndexedDataError("there is nothing to merge: give at least one prefix.")
    output = name_target(output_prefix)
    parts, problems = [], []
    for name in names:
        try:
            part = IndexedDataset(name)
            part.check()  # every entry: nothing is checked again later
            parts.append(part)
        except IndexedDataError as error:
            problems.append(str(error))
    problems = problems or _find_merge_problems(parts, output)
    if problems:
        raise IndexedDataError(problems)
    with IndexedWriter(output, parts[0].dtype) as writer:
        for part in parts:
            writer.append_file(get_data_path(part.prefix), part.sizes, part.doc_idx, part.modes)


def _find_merge_problems(parts: list[IndexedDataset], output: str) -> list[str]:
    problems = []
    if len({part.dtype for part in parts}) > 1:
        problems.append(_describe_difference("dtypes", {p.prefix: p.dtype.name for p in parts}))
    if len({part.modes is None for part in parts if len(part)}) > 1:
        has_modes = {p.prefix: "without" if p.modes is None else "with" for p in parts if len(p)}
        problems.append(_describe_difference("multimodal mode bytes", has_modes))
    target = get_index_path(output)
    if is_file(target) and any(target.samefile(get_index_path(part.prefix)) for part in parts):
        problems.append(f"{output} is one of the inputs: choose another output prefix.")
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    need = sum(
        HEADER.size + 12 * len(part) + 8 * part.doc_idx.size + part.num_tokens * part.dtype.itemsize
        for part in parts
    )
    if (free := shutil.disk_usage(folder).free) < need:
        problems.append(f"{output} needs {need:,} bytes, but {folder} has {free:,} free.")
    return problems


def _describe_difference(what: str, values: dict[str, str]) -> str:
    lists: dict[str, list[str]] = {}
    for prefix, value in values.items():
        lists.setdefault(value, []).append(prefix)
    groups = "; ".join(f"{value}: {list_first(group, 5)}" for value, group in lists.items())
    return f"pairs of different {what} cannot be merged: {groups}."
