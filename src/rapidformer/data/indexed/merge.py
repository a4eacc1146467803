"""Join several pairs into one, as if everything had been written in one go."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

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


def merge_indexed(prefixes: Iterable[str | Path], output_prefix: str | Path) -> None:
    """Write the sequences and documents of all pairs, in the given order, as one pair.

    Pairs in the older lazy/cached format are accepted; the output is always mmap.
    """
    names = [strip_ending(prefix) for prefix in prefixes]
    if not names:
        raise IndexedDataError("there is nothing to merge: give at least one prefix.")
    output = name_target(output_prefix)
    parts = _open_all(names)
    _check_together(parts, output)
    with IndexedWriter(output, parts[0].dtype) as writer:
        for part in parts:
            writer.append_file(get_data_path(part.prefix), part.sizes, part.doc_idx, part.modes)


def _open_all(names: list[str]) -> list[IndexedDataset]:
    """Open every part and check every entry: nothing is checked again later."""
    parts, problems = [], []
    for name in names:
        try:
            part = IndexedDataset(name)
            part.check()
        except IndexedDataError as error:
            problems.append(str(error))
        else:
            parts.append(part)
    if problems:
        raise IndexedDataError(problems)
    return parts


def _check_together(parts: list[IndexedDataset], output: str) -> None:
    problems = []
    if len({part.dtype for part in parts}) > 1:
        problems.append(_describe_difference("dtypes", {p.prefix: p.dtype.name for p in parts}))
    if len({part.modes is None for part in parts if len(part)}) > 1:
        has_modes = {p.prefix: "without" if p.modes is None else "with" for p in parts if len(p)}
        problems.append(_describe_difference("multimodal mode bytes", has_modes))
    target = get_index_path(output)
    if is_file(target):
        for part in parts:
            if target.samefile(get_index_path(part.prefix)):
                problems.append(f"{output} is one of the inputs: choose another output prefix.")
                break
    folder = target.absolute().parent
    need = sum(_count_bytes(part) for part in parts)
    while not folder.exists():
        folder = folder.parent
    if (free := shutil.disk_usage(folder).free) < need:
        problems.append(f"{output} needs {need:,} bytes, but {folder} has {free:,} free.")
    if problems:
        raise IndexedDataError(problems)


def _count_bytes(part: IndexedDataset) -> int:
    entries = 12 * len(part) + 8 * part.doc_idx.size
    return HEADER.size + entries + part.num_tokens * part.dtype.itemsize


def _describe_difference(what: str, values: dict[str, str]) -> str:
    lists: dict[str, list[str]] = {}
    for prefix, value in values.items():
        lists.setdefault(value, []).append(prefix)
    groups = "; ".join(
        f"{value}: {', '.join(group[:5])}{', ...' if len(group) > 5 else ''}"
        for value, group in lists.items()
    )
    return f"pairs of different {what} cannot be merged: {groups}."
