"""The layout of Megatron's ``.idx`` files, and how a pair of files is named.

The header has 34 bytes, so every array in the index is unaligned and is read in place. Pointers
count bytes; ``doc_idx`` counts sequences and has one entry more than there are documents.
"""

from __future__ import annotations

import difflib
import errno
import mmap
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rapidformer.errors import DataError

MMAP_MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of doc_idx

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
SIZE_DTYPE = np.dtype("<i4")
OFFSET_DTYPE = np.dtype("<i8")
MAX_SEQUENCE = 2**31 - 1


class IndexedDataError(DataError):
    """A ``.bin/.idx`` pair that is missing, damaged, mismatched or cannot be written."""

    def __init__(self, problems: str | Iterable[str], subject: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        start = f"{subject} cannot be read" if subject else ""
        if len(self.problems) == 1:
            super().__init__(f"{start}: {self.problems[0]}" if start else self.problems[0])
        else:
            lines = "\n".join(f"  - {problem}" for problem in self.problems)
            count = f"{len(self.problems)} problems"
            super().__init__(f"{start}, {count}:\n{lines}" if start else f"{count}:\n{lines}")


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


# --- names ---------------------------------------------------------------------------------------


def get_data_path(prefix: str | Path) -> Path:
    """The file that holds the tokens."""
    return Path(f"{os.fspath(prefix)}.bin")


def get_index_path(prefix: str | Path) -> Path:
    """The file that says where each sequence is."""
    return Path(f"{os.fspath(prefix)}.idx")


def strip_ending(prefix: str | Path) -> str:
    """The prefix of a pair; either of its two files may be given."""
    text = os.fspath(prefix)
    is_named_so = is_file(get_index_path(text))
    return text[:-4] if text.endswith((".bin", ".idx")) and not is_named_so else text


def name_target(prefix: str | Path) -> str:
    """The prefix to write a pair to."""
    text = os.fspath(prefix)
    stem = text[:-4] if text.endswith((".bin", ".idx")) else text
    if not Path(stem).name or stem.endswith(("/", os.sep)):
        raise IndexedDataError(
            f"{text!r} names no files to write: give a folder and the start of a name, such as "
            "data/corpus for data/corpus.bin and data/corpus.idx."
        )
    return stem


def is_file(path: Path) -> bool:
    """Whether the file exists. A folder without access permission is an error, not a no."""
    try:
        return path.is_file()
    except OSError as error:
        raise IndexedDataError(f"{path} cannot be reached: {error.strerror}.") from error


def has_indexed(prefix: str | Path) -> bool:
    """Whether both files exist."""
    stem = strip_ending(prefix)
    return is_file(get_data_path(stem)) and is_file(get_index_path(stem))


def list_prefixes(folder: Path) -> list[str]:
    """Every name in a folder that has an ``.idx`` or ``.bin``, without the suffix, sorted."""
    try:
        names = {p.stem for p in folder.iterdir() if p.suffix in (".idx", ".bin") and p.is_file()}
    except OSError:
        return []
    return sorted(name for name in names if not name.startswith("."))


def check_files_exist(prefix: str) -> None:
    """Refuse a prefix that lacks a file, and suggest similar names."""
    missing = [p for p in (get_data_path(prefix), get_index_path(prefix)) if not is_file(p)]
    if len(missing) == 2:
        names = f"{missing[0]} and {missing[1].name}"
        raise IndexedDataError(f"{names} are missing: {_describe_near(prefix)}", prefix)
    if missing:
        there = ".idx" if missing[0].suffix == ".bin" else ".bin"
        raise IndexedDataError(
            f"{missing[0]} is missing, although its {there} is there: only the two together can be "
            "read.",
            prefix,
        )


def _describe_near(prefix: str) -> str:
    path = Path(prefix)
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}."
    found = [name for name in list_prefixes(folder) if has_indexed(folder / name)]
    if not found:
        where = "the current folder" if folder == Path() else folder
        return f"{where} holds no .bin/.idx pair; `rapidformer preprocess` writes them."
    if path.is_dir():
        near = found
    else:
        near = [name for name in found if name.startswith(path.name)]
        near = near or difflib.get_close_matches(path.name, found, n=3, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(str(folder / name) for name in near[:3])}?"
    return f"{folder} holds {', '.join(found[:5])}{', ...' if len(found) > 5 else ''}."


# --- reading an index ----------------------------------------------------------------------------


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


def load_mmap_index(prefix: str, mapped: mmap.mmap | bytes, data_bytes: int) -> Index:
    """Read the header and create views of the arrays; their contents are checked elsewhere."""
    name = get_index_path(prefix).name
    if len(mapped) < HEADER.size:
        raise IndexedDataError(
            f"{name} has {len(mapped)} bytes, its header alone has {HEADER.size}.", prefix
        )
    _, version, code, num_sequences, num_marks = HEADER.unpack_from(mapped)
    problems = []
    if version != VERSION:
        problems.append(f"{name} is of version {version}; version {VERSION} can be read.")
    if code not in DTYPES:
        problems.append(f"{name} names the token dtype {code}; known are {_list_codes()}.")
    whole = HEADER.size + 12 * num_sequences + 8 * num_marks
    if len(mapped) not in (whole, whole + num_sequences):
        problems.append(
            f"{name} has {len(mapped)} bytes, but its {num_sequences} sequences and "
            f"{num_marks} document marks take {whole}."
        )
    if problems:
        raise IndexedDataError(problems, prefix)
    pointers_at = HEADER.size + 4 * num_sequences
    sizes = np.frombuffer(mapped, SIZE_DTYPE, num_sequences, HEADER.size)
    pointers = np.frombuffer(mapped, OFFSET_DTYPE, num_sequences, pointers_at)
    doc_idx = np.frombuffer(mapped, OFFSET_DTYPE, num_marks, pointers_at + 8 * num_sequences)
    modes = None
    if len(mapped) > whole:
        modes = np.frombuffer(mapped, np.int8, num_sequences, whole)
    dtype = DTYPES[code]
    if code == 7 and _is_double(sizes, pointers, data_bytes):
        dtype = np.dtype("<f8")  # the Megatron of 2021 wrote doubles under this code
    return Index("mmap", dtype, sizes, pointers, 1, doc_idx, modes)


def _is_double(sizes: np.ndarray, pointers: np.ndarray, data_bytes: int) -> bool:
    return bool(sizes.size) and int(pointers[-1]) + 8 * int(sizes[-1]) == data_bytes


def _list_codes() -> str:
    return ", ".join(f"{code} {dtype.name}" for code, dtype in DTYPES.items())
