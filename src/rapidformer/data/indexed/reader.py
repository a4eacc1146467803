"""Read a ``.bin/.idx`` pair as read-only views of the mapped file: copy before modifying."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, overload

import numpy as np

from rapidformer.data.indexed.index import find_problems, load_index, map_file
from rapidformer.data.indexed.layout import (
    HEADER,
    IndexedDataError,
    check_files_exist,
    get_data_path,
    get_index_path,
    is_file,
    name_target,
    strip_ending,
)
from rapidformer.data.indexed.writer import IndexedWriter
from rapidformer.errors import list_first

_BLOCK = 8 * 1024 * 1024
# Asking for a file's size costs more than reading a sample, so it is not done for each.
_LOOK_SECONDS = 0.01


class IndexedDataset:
    """The sequences of a pair of files. Pickling stores only its name; unpickling reopens it."""

    def __init__(self, prefix: str | Path, impl: str = "infer") -> None:
        self._open(strip_ending(prefix), impl)

    def _open(self, prefix: str, impl: str) -> None:
        self.prefix = prefix
        self.impl = impl
        self._location = str(Path(prefix).absolute())
        check_files_exist(prefix)
        data = map_file(get_data_path(prefix))
        self._index = load_index(prefix, impl, len(data))
        self._refuse(find_problems(self._index, len(data)))
        self.format = self._index.format
        """``mmap``, or ``cached`` for the older format written as lazy or cached."""
        self.dtype: np.dtype[Any] = self._index.dtype
        self.sizes = self._index.sizes
        self.doc_idx = self._index.doc_idx
        self.modes = self._index.modes
        """One int8 per sequence in multimodal files; None elsewhere."""
        # One array over the whole file: slicing it takes a third of the time of a new array per
        # sequence, and a tenth of slicing numpy's memmap.
        self._tokens = np.frombuffer(data, self.dtype) if data else np.empty(0, self.dtype)
        self.num_tokens = int(self._tokens.size)
        """The number of tokens in all sequences."""
        self._pointers = self._index.pointers
        self._steps = self.dtype.itemsize // self._index.pointer_bytes
        paths = (get_data_path(self._location), get_index_path(self._location))
        self._files = [(path, path.stat()) for path in paths]
        self._look_again_at = 0.0

    @property
    def pointers(self) -> np.ndarray:
        """Where each sequence starts in the ``.bin``, in bytes."""
        step = self._index.pointer_bytes
        return self._pointers if step == 1 else self._pointers * step

    @property
    def num_documents(self) -> int:
        """The number of documents, each of one or more sequences."""
        return int(self.doc_idx.size) - 1

    def __len__(self) -> int:
        return int(self.sizes.size)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """The tokens of one sequence, or ``length`` of them starting at ``offset``."""
        size = self.sizes.item(index)
        if length is None:
            length = size - offset
        start = self._pointers.item(index) // self._steps + offset
        stop = start + length
        # The middle of a long index was not checked on opening, and a slice beyond the end of the
        # file would silently be shorter.
        if not (0 <= offset <= offset + length <= size and 0 <= start <= stop <= self.num_tokens):
            raise self._describe_range(index, offset, length)
        self._notice_shrinking()
        return self._tokens[start:stop]

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if not isinstance(index, slice):
            return self.get(index)
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise IndexError(
                f"[{index.start}:{index.stop}:{index.step}] of {self.prefix}: slices are "
                "contiguous, their step is 1"
            )
        return [self.get(i) for i in range(start, stop)]

    def read_tokens(self, start: int, length: int) -> np.ndarray:
        """``length`` tokens starting at token ``start`` of the whole file, across sequences."""
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(
                f"{length} tokens from {start} on of {self.prefix}, which has {self.num_tokens}"
            )
        self._notice_shrinking()
        return self._tokens[start : start + length]

    def _notice_shrinking(self) -> None:
        """Say that a file was cut short: reading beyond its end would kill the process (SIGBUS)."""
        now = time.monotonic()
        if now < self._look_again_at:
            return
        self._look_again_at = now + _LOOK_SECONDS
        for path, before in self._files:
            try:
                now_there = path.stat()
            except OSError:
                continue  # a deleted file keeps its content for those who have it open
            if os.path.samestat(now_there, before) and now_there.st_size < before.st_size:
                raise IndexedDataError(
                    f"{path.name} has shrunk from {before.st_size} to {now_there.st_size} bytes "
                    "since it was opened: something writes to it. Write it again, and resume the "
                    "run.",
                    self.prefix,
                )

    def check(self) -> None:
        """Check every entry of the index; raise if anything is wrong."""
        data_bytes = self.num_tokens * self.dtype.itemsize
        self._refuse(find_problems(self._index, data_bytes, thorough=True))

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            raise IndexedDataError(problems, self.prefix)

    def _describe_range(self, index: int, offset: int, length: int) -> Exception:
        size = self.sizes.item(index)
        start = self._pointers.item(index) // self._steps
        if size >= 0 and 0 <= start <= self.num_tokens - size:
            return IndexError(
                f"{length} tokens from {offset} on were asked of sequence {index} of "
                f"{self.prefix}, which has {size}"
            )
        return IndexedDataError(
            f"its index is damaged: sequence {index} is said to have {size} tokens from {start} "
            f"on, of {self.num_tokens} in the .bin; `rapidformer data info {self.prefix}` shows "
            "more.",
            self.prefix,
        )

    def __repr__(self) -> str:
        return (
            f"IndexedDataset({self.prefix!r}, {self.num_documents} documents, {len(self)} "
            f"sequences, {self.num_tokens} tokens of {self.dtype.name})"
        )

    def __getstate__(self) -> dict[str, str]:
        return {"prefix": self.prefix, "location": self._location, "impl": self.impl}

    def __setstate__(self, state: dict[str, str]) -> None:
        # A worker may have been started in another folder.
        is_same = str(Path(state["prefix"]).absolute()) == state["location"]
        self._open(state["prefix"] if is_same else state["location"], state["impl"])


def open_indexed(
    prefix: str | Path, impl: str = "infer", *, warmup: bool = False
) -> IndexedDataset:
    """Open a pair by its prefix; ``warmup`` reads both files once to bring them into memory."""
    dataset = IndexedDataset(prefix, impl)
    if warmup:
        _read_through(get_index_path(dataset.prefix))
        _read_through(get_data_path(dataset.prefix))
    return dataset


def _read_through(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        block = bytearray(_BLOCK)
        while file.readinto(block):
            pass


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
