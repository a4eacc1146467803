"""``state/index.json``: where the parts of each tensor are.

Nothing in it is trusted. torch would open any file that an index names, and would leave elements
that no part covers as they were, so both are checked before anything is read.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rapidformer.checkpoint.publish import read_json
from rapidformer.errors import CheckpointError
from rapidformer.models.weight_files import read_places

INDEX = "index.json"
_SAFETENSORS = ".safetensors"
Sizes = tuple[int, ...]
_MOST_CELLS = 10_000_000
_MOST_SPLIT = 8
"""Dims of one tensor; a run splits two at most."""
_LARGEST = 2**63 - 1


class Part(NamedTuple):
    """A box of a tensor's elements, and the bytes of a file that hold them."""

    offsets: Sizes
    sizes: Sizes
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Entry:
    """One tensor."""

    dtype: torch.dtype
    shape: Sizes
    parts: list[Part]


Index = dict[str, Entry]


def write_index(index: Index, folder: Path) -> None:
    """Write the index of a folder's tensors."""
    tensors = {
        name: {"dtype": name_dtype(entry.dtype), "shape": entry.shape, "parts": entry.parts}
        for name, entry in sorted(index.items())
    }
    (folder / INDEX).write_text(json.dumps({"tensors": tensors}), encoding="utf-8")


def read_index(folder: Path) -> Index:
    """Read the index of a folder's tensors; check it before use."""
    tensors = read_json(folder / INDEX).get("tensors")
    try:
        if not isinstance(tensors, dict):
            raise TypeError("it lists no tensors")
        return {
            name: Entry(
                to_dtype(entry["dtype"]), to_sizes(entry["shape"]),
                [build_part(*part) for part in entry["parts"]],
            )
            for name, entry in tensors.items()
        }  # fmt: skip
    except (LookupError, TypeError, ValueError) as reason:
        raise CheckpointError(
            f"{folder / INDEX} is not the index of a checkpoint: it is malformed ({reason})."
        ) from None


def check_index(index: Index, folder: Path, source: Path) -> None:
    """Refuse what ``source`` says if it leaves gaps, or leads out of the folder's own files."""
    for problem in find_index_problems(index, folder):
        raise CheckpointError(f"{source} is not the index of a checkpoint: {problem}.")


def find_index_problems(index: Index, folder: Path) -> Iterator[str]:
    """Every tensor that is not covered, and every place that does not exist."""
    by_file: dict[str, list[tuple[str, Entry, Part]]] = defaultdict(list)
    for name, entry in index.items():
        if not _covers(entry.parts, entry.shape):
            yield f"its parts do not make up the whole of {name}"
        for part in entry.parts:
            by_file[part.file].append((name, entry, part))
            if part.length < prod(part.sizes) * entry.dtype.itemsize:
                yield f"a part of {name} has {part.length} bytes, too few for {list(part.sizes)}"
    for file, found in by_file.items():
        size = _measure(folder, file)
        if size is None:
            yield f"it refers to {file}, which is not a file of this folder"
        elif any(part.start + part.length > size for _, _, part in found):
            yield f"it refers to bytes that {file} does not have"
        elif sum(part.length for _, _, part in found) > size:
            # Each part takes a moment to read: this bounds their number by what is there.
            yield f"several of its parts are the same bytes of {file}"
        elif is_model_file(file):
            yield from _compare_header(folder / file, found)


def _compare_header(path: Path, found: Sequence[tuple[str, Entry, Part]]) -> Iterator[str]:
    """The bytes of such a file do not say what they are: its header does."""
    try:
        places = read_places(path)
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as reason:
        yield f"the header of {path.name} cannot be read ({reason})"
        return
    for name, entry, part in found:
        if part.length and places.get(part.start) != (entry.dtype, part.sizes):
            yield f"{name} is not what the header of {path.name} says of these bytes"


def is_model_file(name: str) -> bool:
    """Whether it is a safetensors file beside the folder of the index: the model's own weights."""
    return name == f"../{Path(name).name}" and name.endswith(_SAFETENSORS)


def _measure(folder: Path, file: str) -> int | None:
    try:
        is_here = Path(file).name == file or is_model_file(file)
        return (folder / file).stat().st_size if is_here and (folder / file).is_file() else None
    except (OSError, ValueError):  # a name that no file can have
        return None


def build_part(offsets: Any, sizes: Any, file: Any, start: Any, length: Any) -> Part:
    """A part, if these values can be one."""
    if not isinstance(file, str):
        raise TypeError("a file's name is not text")
    return Part(to_sizes(offsets), to_sizes(sizes), file, _to_count(start), _to_count(length))


def to_sizes(values: Any) -> Sizes:
    """A tuple of sizes or offsets, if that is what these values are."""
    if not isinstance(values, (list, tuple)):
        raise TypeError("a size is not a list of numbers")
    return tuple(_to_count(value) for value in values)


def _to_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise TypeError("a size or offset is not a whole number from 0 on")
    return value


def to_dtype(name: Any) -> torch.dtype:
    """The data type of this name."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a data type is not one of torch's")
    return dtype


def name_dtype(dtype: torch.dtype) -> str:
    """What ``to_dtype`` reads: ``float32``"""
    return str(dtype).removeprefix("torch.")


def _covers(parts: Sequence[Part], shape: Sizes) -> bool:
    """Whether the parts lie within the tensor, and every element is in one of them."""
    if prod(shape) == 0:
        return True
    if any(not len(part.offsets) == len(part.sizes) == len(shape) for part in parts):
        return False
    whole = np.array(shape, dtype=np.int64)
    starts, sizes = (
        np.array(rows, dtype=np.int64).reshape(len(parts), len(shape))
        for rows in ([part.offsets for part in parts], [part.sizes for part in parts])
    )
    if ((starts > whole) | (sizes > whole - starts)).any():
        return False
    split = np.flatnonzero((sizes != whole).any(axis=0))
    if not len(split):
        return len(parts) > 0
    # Where parts begin and end cuts the tensor into cells. Each part counts at its corners, such
    # that the sums along every dim are the number of parts over each cell.
    edges = [np.unique([0, whole[d], *starts[:, d], *(starts + sizes)[:, d]]) for d in split]
    if len(split) > _MOST_SPLIT or prod(len(edge) for edge in edges) > _MOST_CELLS:
        return False
    counts = np.zeros([len(edge) for edge in edges], dtype=np.int32)
    ends = [
        [np.searchsorted(edge, places[:, d]) for places in (starts, starts + sizes)]
        for edge, d in zip(edges, split, strict=True)
    ]
    for corner in itertools.product((0, 1), repeat=len(split)):
        place = tuple(end[side] for end, side in zip(ends, corner, strict=True))
        np.add.at(counts, place, (-1) ** sum(corner))
    for axis in range(counts.ndim):
        np.cumsum(counts, axis=axis, out=counts)
    return bool((counts[(slice(-1),) * counts.ndim] > 0).all())
