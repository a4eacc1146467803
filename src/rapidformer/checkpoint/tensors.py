"""Read tensors through ``torch.distributed.checkpoint``; a weight of several names once."""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from rapidformer.checkpoint.finding import RUN, blaming, read_run
from rapidformer.checkpoint.index import INDEX, Index, check_index, is_model_file, read_index
from rapidformer.checkpoint.pieces import split_strided, to_metadata
from rapidformer.compat.torch_distributed import open_part
from rapidformer.dist.topology import Topology
from rapidformer.errors import CheckpointError


def load_tensors(tensors: dict[str, torch.Tensor], folder: Path, topology: Topology) -> None:
    """Fill the tensors in place from a folder, whatever layout it was saved in."""
    with _reading(folder):
        pieces = {name: split_strided(tensor) for name, tensor in tensors.items()}
        # Pipeline stages ask for different names: each reads by itself.
        is_alone = not dist.is_initialized() or topology.pipeline > 1
        load(pieces, storage_reader=_Reader(folder), no_dist=is_alone)


def load_named(tensors: dict[str, torch.Tensor], folder: Path, topology: Topology) -> None:
    """Fill the tensors in place, each by its own name or the one that it is stored under."""
    ties = _read_ties(folder)
    untied = {name: tensor for name, tensor in tensors.items() if name not in ties}
    load_tensors(untied, folder / "state", topology)
    for name, tensor in tensors.items():
        # By themselves: a stage of a pipeline, or an untied model, has a copy of its own.
        if name in ties:
            load_tensors({ties[name]: tensor}, folder / "state", topology)


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a folder's tensors."""
    return {name: entry.shape for name, entry in _read_checked_index(folder).items()}


def read_saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by every name that a checkpoint answers to."""
    shapes = read_shapes(folder / "state")
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
    """The tensors of a folder, to read one by one; the index is read and checked once."""

    def __init__(self, folder: Path) -> None:
        index = _read_checked_index(folder)
        self.kinds: dict[str, tuple[torch.Size, torch.dtype]] = {
            name: (torch.Size(entry.shape), entry.dtype) for name, entry in index.items()
        }
        """Name -> shape and data type."""
        self._folder, self._reader = folder, _Reader(folder)
        self._reader.known = to_metadata(index)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, whole, in host memory."""
        shape, dtype = self.kinds[name]
        tensor = torch.empty(shape, dtype=dtype)
        with _reading(self._folder):
            load({name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class _Reader(FileSystemReader):
    known: Metadata | None = None
    """The index, if it was read and checked before."""
    _entries: dict[str, Any]
    """What the index says of each tensor."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = self.known or to_metadata(_read_checked_index(Path(self.path)))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        self._entries = metadata.state_dict_metadata
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As torch does; but torch converts what is of another type than the index says."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            with (Path(self.path) / name).open("rb") as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read_part(file, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_part(self, file: IOBase, item: ReadItem) -> torch.Tensor:
        name, place = item.storage_index.fqn, self.storage_data[item.storage_index]
        view, entry = open_part(file, place.offset, place.length), self._entries[name]
        wanted = entry.properties.dtype
        if is_model_file(place.relative_path):
            content = bytearray(view.read(place.length))
            part = torch.frombuffer(content, dtype=wanted) if content else torch.empty(0)
            part = part.to(wanted).view(entry.size)
        else:
            part = torch.load(view, map_location="cpu", weights_only=True)
        if part.dtype != wanted:
            raise ValueError(f"a part of {name} holds {part.dtype}, its index says {wanted}")
        for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, start, size)
        return part


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Say in one line what cannot be read: torch wraps it in a traceback of every rank."""
    try:
        with warnings.catch_warnings():
            # Single-process runs are fine.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    # Not an Exception in torch: an ordinary `except` would let it through as a crash.
    except CheckpointException as reason:
        cause: BaseException = next((failure[0] for failure in reason.failures.values()), reason)
        lines = [line for line in str(cause).splitlines() if line.strip()]
        text = lines[0] if lines else type(cause).__name__
        raise CheckpointError(f"{folder} cannot be read: {text}") from None
