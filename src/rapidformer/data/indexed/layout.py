"""The layout of Megatron's ``.idx`` files, and how a pair of files is named.

The header has 34 bytes, so every array in the index is unaligned and is read in place. Pointers
count bytes; ``doc_idx`` counts sequences and has one entry more than there are documents.
"""

from __future__ import annotations

import difflib
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rapidformer.errors import DataError, join_problems, list_first

MMAP_MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of doc_idx

_TYPES = ("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(t) for code, t in enumerate(_TYPES, start=1)}
SIZE_DTYPE = np.dtype("<i4")
OFFSET_DTYPE = np.dtype("<i8")
MAX_SEQUENCE = 2**31 - 1


class IndexedDataError(DataError):
    """A ``.bin/.idx`` pair that is missing, damaged, mismatched or cannot be written."""

    def __init__(self, problems: str | Iterable[str], subject: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        text = join_problems(self.problems)
        if subject is not None:
            text = f"{subject} cannot be read{':' if len(self.problems) == 1 else ','} {text}"
        super().__init__(text)


def get_data_path(prefix: str | Path) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def get_index_path(prefix: str | Path) -> Path:
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
    names = [name for name in list_prefixes(folder) if has_indexed(folder / name)]
    if not names:
        where = "the current folder" if folder == Path() else folder
        return f"{where} holds no .bin/.idx pair; `rapidformer preprocess` writes them."
    if path.is_dir():
        near = names
    else:
        near = [name for name in names if name.startswith(path.name)]
        near = near or difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(str(folder / name) for name in near[:3])}?"
    return f"{folder} holds {list_first(names, 5)}."
