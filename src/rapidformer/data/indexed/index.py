"""Read an ``.idx`` file, of Megatron's current format or its older one, and check it.

The older format was written with ``--dataset-impl lazy`` or ``cached``. Its offsets count elements
of ``element_size`` bytes, not bytes, and the size of a float follows from the files rather than the
dtype code. The ``.bin`` holds the same tokens, so the same code maps and reads both.

When an index of more than ``THOROUGH_LIMIT`` sequences is opened, only its two ends are checked, so
that ten million documents open in milliseconds. ``IndexedDataset.check()``, ``data info`` and
``data merge`` check every entry, block by block.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rapidformer.data.indexed.layout import (
    DTYPES,
    HEADER,
    MAX_SEQUENCE,
    MMAP_MAGIC,
    OFFSET_DTYPE,
    SIZE_DTYPE,
    VERSION,
    IndexedDataError,
    get_index_path,
)

THOROUGH_LIMIT = 1 << 20
_BLOCK = 1 << 20
_IMPLEMENTATIONS = ("infer", "mmap", "lazy", "cached")
_LEGACY_MAGIC = b"TNTIDX\x00\x00"
_LEGACY_HEADER = struct.Struct("<8sQQQQQQ")  # magic, version, dtype, element size, N, sizes, marks


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of an ``.idx`` file; the arrays are views of the mapped file."""

    format: str
    dtype: np.dtype[Any]
    sizes: np.ndarray
    pointers: np.ndarray
    """Where each sequence starts in the ``.bin``, in units of ``pointer_bytes``."""
    pointer_bytes: int
    doc_idx: np.ndarray
    modes: np.ndarray | None = None


def load_index(prefix: str, impl: str, data_bytes: int) -> Index:
    """Read the header and create views of the arrays; their contents are checked elsewhere."""
    if impl not in _IMPLEMENTATIONS:
        raise IndexedDataError(
            f"--data-impl {impl} is unknown: use one of {', '.join(_IMPLEMENTATIONS)}."
        )
    name = get_index_path(prefix).name
    mapped = map_file(get_index_path(prefix))
    if mapped[: len(_LEGACY_MAGIC)] == _LEGACY_MAGIC:
        kind, header, load = "cached", _LEGACY_HEADER, _load_legacy
    elif mapped[: len(MMAP_MAGIC)] == MMAP_MAGIC:
        kind, header, load = "mmap", HEADER, _load_mmap
    elif not mapped:
        raise IndexedDataError(f"{name} is empty (0 bytes).", prefix)
    else:
        raise IndexedDataError(
            f"{name} starts with {bytes(mapped[:9])!r}, which is neither {MMAP_MAGIC!r} "
            f"(mmap) nor {_LEGACY_MAGIC!r} (lazy, cached): it is not a Megatron index.",
            prefix,
        )
    if impl not in ("infer", kind) and (impl, kind) != ("lazy", "cached"):
        raise IndexedDataError(
            f"it is of the {kind} format, but --data-impl is {impl}: use {kind} or infer.", prefix
        )
    if len(mapped) < header.size:
        raise IndexedDataError(
            f"{name} has {len(mapped)} bytes, its header alone has {header.size}.", prefix
        )
    return load(prefix, mapped, data_bytes)


def map_file(path: Path) -> mmap.mmap | bytes:
    """The file's bytes, mapped; an empty file cannot be mapped and needs no map."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            if sys.version_info >= (3, 13):
                # Without keeping a file descriptor: a blend may map thousands of files.
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, trackfd=False)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        hint = ": raise the limit with `ulimit -n`" if error.errno == errno.EMFILE else ""
        text = f"{path} cannot be opened: {error.strerror or error}{hint}."
        raise IndexedDataError(text) from error


def _load_mmap(prefix: str, mapped: mmap.mmap | bytes, data_bytes: int) -> Index:
    _, version, code, count, num_marks = HEADER.unpack_from(mapped)
    whole = HEADER.size + 12 * count + 8 * num_marks
    sizes_of_file = (whole, whole + count)  # without modes, and with them
    _check_header(prefix, len(mapped), version, code, count, num_marks, sizes_of_file)
    pointers_at = HEADER.size + 4 * count
    sizes = np.frombuffer(mapped, SIZE_DTYPE, count, HEADER.size)
    pointers = np.frombuffer(mapped, OFFSET_DTYPE, count, pointers_at)
    doc_idx = np.frombuffer(mapped, OFFSET_DTYPE, num_marks, pointers_at + 8 * count)
    modes = np.frombuffer(mapped, np.int8, count, whole) if len(mapped) > whole else None
    dtype = DTYPES[code]
    if code == 7 and count and int(pointers[-1]) + 8 * int(sizes[-1]) == data_bytes:
        dtype = np.dtype("<f8")  # the Megatron of 2021 wrote doubles under this code
    return Index("mmap", dtype, sizes, pointers, 1, doc_idx, modes)


def _load_legacy(prefix: str, mapped: mmap.mmap | bytes, data_bytes: int) -> Index:
    """The sizes become int32."""
    name = get_index_path(prefix).name
    _, version, code, element_bytes, count, num_sizes, num_marks = _LEGACY_HEADER.unpack_from(
        mapped
    )
    problems = []
    if num_sizes != count:
        problems.append(
            f"{name} has {num_sizes} sizes for {count} sequences: tokens of more than one "
            "dimension cannot be read."
        )
    whole = _LEGACY_HEADER.size + 8 * (2 * (count + 1) + num_sizes + num_marks)
    _check_header(prefix, len(mapped), version, code, count, num_marks, (whole,), problems)
    offsets_at = _LEGACY_HEADER.size + 8 * (count + 1)
    offsets = np.frombuffer(mapped, OFFSET_DTYPE, count + 1, offsets_at)
    sizes = np.frombuffer(mapped, OFFSET_DTYPE, count, offsets_at + 8 * (count + 1))
    doc_idx = np.frombuffer(mapped, OFFSET_DTYPE, num_marks, offsets_at + 8 * (2 * count + 1))
    if count and not 0 <= int(sizes.min()) <= int(sizes.max()) <= MAX_SEQUENCE:
        raise IndexedDataError(
            f"{name} has sequences of {sizes.min()} to {sizes.max()} tokens.", prefix
        )
    dtype = DTYPES[code]
    total = int(sizes.sum(dtype=np.int64))
    if dtype.kind == "f" and total and data_bytes in (4 * total, 8 * total):
        # Writers of the time gave doubles an element size of 4, or floats the code of doubles.
        dtype = np.dtype(f"<f{data_bytes // total}")
    if element_bytes not in (1, 2, 4, 8) or dtype.itemsize % element_bytes:
        problem = f"says {element_bytes} bytes per token, but {dtype.name} has {dtype.itemsize}."
        raise IndexedDataError(f"{name} {problem}", prefix)
    if int(offsets[-1]) * element_bytes != data_bytes:
        raise IndexedDataError(
            f"{Path(name).stem}.bin has {data_bytes} bytes, but its index describes "
            f"{int(offsets[-1]) * element_bytes}.",
            prefix,
        )
    narrow = sizes.astype(SIZE_DTYPE)
    return Index("cached", dtype, narrow, offsets[:-1], int(element_bytes), doc_idx)


def _check_header(
    prefix: str,
    size: int,
    version: int,
    code: int,
    count: int,
    num_marks: int,
    sizes: tuple[int, ...],
    more_problems: list[str] | None = None,
) -> None:
    """Refuse what a header says if it cannot be read, or the file is of none of these sizes."""
    name = get_index_path(prefix).name
    problems = []
    if version != VERSION:
        problems.append(f"{name} is of version {version}; version {VERSION} can be read.")
    if code not in DTYPES:
        codes = ", ".join(f"{number} {dtype.name}" for number, dtype in DTYPES.items())
        problems.append(f"{name} names the token dtype {code}; known are {codes}.")
    problems += more_problems or []
    if size not in sizes:
        problems.append(
            f"{name} has {size} bytes, but its {count} sequences and "
            f"{num_marks} document marks take {sizes[0]}."
        )
    if problems:
        raise IndexedDataError(problems, prefix)


# --- checking ------------------------------------------------------------------------------------


def find_problems(index: Index, data_bytes: int, *, thorough: bool = False) -> list[str]:
    """All problems found; if a quick check finds one, everything is checked."""
    problems = _find_bad_ends(index, data_bytes)
    thorough = thorough or bool(problems) or index.sizes.size <= THOROUGH_LIMIT
    if not thorough:
        # If the ends show a problem, the thorough check describes it.
        last = int(index.pointers[-1]) * index.pointer_bytes
        thorough = bool(
            index.sizes[-1] < 0 or index.pointers[0] != 0 or last % index.dtype.itemsize
        )
    if thorough:
        checks = (_find_bad_size, _find_bad_pointer, _find_bad_mark)
        problems += [problem for check in checks if (problem := check(index))]
    return problems


def _find_bad_ends(index: Index, data_bytes: int) -> list[str]:
    problems = []
    count = index.sizes.size
    if index.doc_idx.size == 0:
        problems.append("it has no document marks; at least the 0 at the start is needed.")
    else:
        if index.doc_idx[0] != 0:
            problems.append(f"the document marks start with {index.doc_idx[0]} instead of 0.")
        if index.doc_idx[-1] != count:
            problems.append(
                f"the document marks end with {index.doc_idx[-1]}, but there are {count} sequences "
                "(merges by Megatron of 2021 lose marks: merge the parts again with "
                "`rapidformer data merge`)."
            )
    end = 0
    if count:
        start = int(index.pointers[-1]) * index.pointer_bytes
        end = start + int(index.sizes[-1]) * index.dtype.itemsize
    if end != data_bytes:
        fault = "was cut short" if data_bytes < end else "has gone on growing"
        problems.append(
            f"the .bin has {data_bytes} bytes, but the last sequence ends at byte {end} "
            f"({index.dtype.name}): the .bin {fault}, or it belongs to another .idx."
        )
    return problems


def _find_bad_size(index: Index) -> str | None:
    for start in range(0, index.sizes.size, _BLOCK):
        block = index.sizes[start : start + _BLOCK]
        if block.min() < 0:
            at = int(np.argmax(block < 0))
            return f"sequence {start + at} has {block[at]} tokens."
    return None


def _find_bad_pointer(index: Index) -> str | None:
    step = index.dtype.itemsize // index.pointer_bytes
    expected_start = 0
    for start in range(0, index.sizes.size, _BLOCK):
        sizes = index.sizes[start : start + _BLOCK]
        # expected[i] is where the sequence after i starts
        expected = np.cumsum(sizes, dtype=np.int64)
        expected *= step
        expected += expected_start
        pointers = index.pointers[start : start + _BLOCK]
        is_wrong = np.empty(len(sizes), bool)
        is_wrong[0] = pointers[0] != expected_start
        np.not_equal(pointers[1:], expected[:-1], out=is_wrong[1:])
        if is_wrong.any():
            at = int(np.argmax(is_wrong))
            right = expected_start if at == 0 else int(expected[at - 1])
            return (
                f"sequence {start + at} points to byte {int(pointers[at]) * index.pointer_bytes}, "
                f"but the sequences before it end at byte {right * index.pointer_bytes}."
            )
        expected_start = int(expected[-1])
    return None


def _find_bad_mark(index: Index) -> str | None:
    for start in range(0, index.doc_idx.size - 1, _BLOCK):
        block = index.doc_idx[start : start + _BLOCK + 1]
        is_wrong = block[1:] < block[:-1]
        if is_wrong.any():
            at = int(np.argmax(is_wrong))
            return (
                f"the document marks go down from {block[at]} to {block[at + 1]} at document "
                f"{start + at}."
            )
    return None
