"""Read tensors, whatever layout they were saved in; a weight of several names once."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from rapidformer.checkpoint.finding import RUN, blaming, read_run
from rapidformer.checkpoint.index import (
    INDEX,
    Index,
    Part,
    Sizes,
    check_index,
    is_model_file,
    read_index,
)
from rapidformer.checkpoint.pieces import cut
from rapidformer.compat.torch_distributed import open_part
from rapidformer.dist.collectives import gather_from_all
from rapidformer.errors import CheckpointError

_Slices = tuple[slice, ...]


def load_named(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill the tensors in place, each by its own name or the one that it is stored under.

    Every rank must call this, and all fail if one does.
    """
    ties, problem = _read_ties(folder), None
    try:
        named = ((ties.get(name, name), tensor) for name, tensor in tensors.items())
        StoredTensors(folder / "state").fill(named)
    except CheckpointError as error:
        problem = error
    for failure in filter(None, gather_from_all(problem)):
        raise failure


def read_saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by every name that a checkpoint answers to."""
    index = _read_checked_index(folder / "state")
    shapes = {name: entry.shape for name, entry in index.items()}
    with blaming(folder):
        return shapes | {name: shapes[first] for name, first in _read_ties(folder).items()}


def check_counter(folder: Path) -> None:
    """Refuse the tensors of another step than ``run.json``'s, as far as Adam's counter tells."""
    for name, counted in read_run(folder).get("counter", {}).items():
        stored = StoredTensors(folder / "state")
        if name not in stored.kinds or stored.read(name).tolist() != counted:
            raise CheckpointError(
                f"{folder} is not what a run writes: {name} is not {counted}, as {RUN} says, so "
                "the tensors are another checkpoint's."
            )


def _read_ties(folder: Path) -> dict[str, str]:
    """The ties of a checkpoint; older ones have none, and store such weights under each name."""
    return read_run(folder).get("tied", {})


def _read_checked_index(folder: Path) -> Index:
    file = folder / INDEX
    try:
        status = file.stat()
    except OSError:
        return read_index(folder)  # which says what is wrong
    return _read_once(folder, file, (status.st_ino, status.st_size, status.st_mtime_ns))


@functools.lru_cache(maxsize=1)
def _read_once(folder: Path, file: Path, version: tuple[int, ...]) -> Index:
    """Of hundreds of thousands of parts, an index takes seconds to check."""
    index = read_index(folder)
    check_index(index, folder, file)
    return index


class StoredTensors:
    """The tensors of a folder; the index is read and checked once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._index = folder, _read_checked_index(folder)
        self.kinds: dict[str, tuple[torch.Size, torch.dtype]] = {
            name: (torch.Size(entry.shape), entry.dtype) for name, entry in self._index.items()
        }
        """Name -> shape and data type."""

    def read(self, name: str) -> Tensor:
        """One tensor, whole, in host memory."""
        shape, dtype = self.kinds[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.fill([(name, tensor)])
        return tensor

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill what this rank holds of each tensor with what is stored under the name."""
        reads: dict[str, list[tuple[str, Part, _Slices, Tensor]]] = defaultdict(list)
        with _reading(self._folder):
            for name, tensor in tensors:
                parts = self._index[name].parts
                for piece in cut(name, tensor):
                    ends = tuple(map(operator.add, piece.offsets, piece.data.shape))
                    for part in parts:
                        if (shared := find_shared(piece.offsets, ends, part)) is not None:
                            reads[part.file].append((name, part, shared[1], piece.data[shared[0]]))
            for file, found in reads.items():
                with (self._folder / file).open("rb") as opened:
                    for name, part, places, target in found:
                        target.copy_(self._read_part(opened, name, part)[places])

    def _read_part(self, file: BufferedReader, name: str, part: Part) -> Tensor:
        wanted = self.kinds[name][1]
        if is_model_file(part.file):
            file.seek(part.start)
            content = bytearray(file.read(part.length))
            return torch.frombuffer(content, dtype=wanted).view(part.sizes)
        view = open_part(file, part.start, part.length)
        read: Tensor = torch.load(view, map_location="cpu", weights_only=True)
        if read.dtype != wanted:
            raise ValueError(f"a part of {name} holds {read.dtype}, its index says {wanted}")
        return read


def find_shared(starts: Sizes, ends: Sizes, part: Part) -> tuple[_Slices, _Slices] | None:
    """Where the elements that a box and a part have in common are in each; None: they have none."""
    offsets, sizes = part.offsets, part.sizes
    for dim, start in enumerate(starts):  # at once: there may be millions of pairs
        if offsets[dim] >= ends[dim] or start >= offsets[dim] + sizes[dim]:
            return None
    lows = list(map(max, starts, offsets))
    highs = list(map(min, ends, map(operator.add, offsets, sizes)))
    inside, there = (
        tuple(slice(low - a, high - a) for low, high, a in zip(lows, highs, origin, strict=True))
        for origin in (starts, offsets)
    )
    return inside, there


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Say in one line what cannot be read."""
    try:
        yield
    except Exception as reason:  # of torch's readers: of many kinds
        lines = [line for line in str(reason).splitlines() if line.strip()]
        text = lines[0] if lines else type(reason).__name__
        raise CheckpointError(f"{folder} cannot be read: {text}") from None
