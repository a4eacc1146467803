"""Read tensors from disk through ``torch.distributed.checkpoint``, whatever layout wrote them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load

from rapidformer.checkpoint.index import INDEX, Index, check_index
from rapidformer.checkpoint.index import read_index as read_our_index
from rapidformer.checkpoint.strided import split_strided
from rapidformer.checkpoint.torch_index import TORCH_INDEX, read_torch_index, to_metadata
from rapidformer.dist.topology import Topology
from rapidformer.errors import CheckpointError


def load_tensors(tensors: dict[str, torch.Tensor], folder: Path, topology: Topology) -> None:
    """Fill the tensors in place from a folder, whatever layout it was saved in."""
    try:
        with _quiet():
            pieces = {name: split_strided(tensor) for name, tensor in tensors.items()}
            # Pipeline stages ask for different names: each reads by itself.
            is_alone = not dist.is_initialized() or topology.pipeline > 1
            load(pieces, storage_reader=_Reader(folder), no_dist=is_alone)
    # Not an Exception in torch: an ordinary `except` would let it through as a crash.
    except CheckpointException as reason:
        raise CheckpointError(f"{folder} cannot be read: {_get_cause(reason)}") from None


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a folder's tensors."""
    return {name: entry.shape for name, entry in _read_checked_index(folder).items()}


def read_index(folder: Path) -> Index:
    """The index of a folder's tensors; what it says is not checked yet."""
    is_old = get_index_name(folder) == TORCH_INDEX
    return read_torch_index(folder) if is_old else read_our_index(folder)


def get_index_name(folder: Path) -> str:
    """The file that is read as the index: older checkpoints have only torch's own."""
    return INDEX if (folder / INDEX).exists() else TORCH_INDEX


def _read_checked_index(folder: Path) -> Index:
    index = read_index(folder)
    check_index(index, folder, folder / get_index_name(folder))
    return index


class StoredTensors:
    """The tensors of a folder, to read one by one; the index is read and checked once."""

    def __init__(self, folder: Path) -> None:
        index = _read_checked_index(folder)
        self.kinds: dict[str, tuple[torch.Size, torch.dtype]] = {
            name: (torch.Size(entry.shape), entry.dtype) for name, entry in index.items()
        }
        """Name -> shape and data type."""
        self._reader = _Reader(folder)
        self._reader.known = to_metadata(index)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, whole, in host memory."""
        shape, dtype = self.kinds[name]
        tensor = torch.empty(shape, dtype=dtype)
        try:
            with _quiet():
                load({name: tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as reason:
            raise CheckpointError(
                f"{self._reader.path} cannot be read: {_get_cause(reason)}"
            ) from None
        return tensor


class _Reader(FileSystemReader):
    known: Metadata | None = None
    """The index, if it was read and checked before."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = self.known or to_metadata(_read_checked_index(Path(self.path)))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns about single-process runs, which are fine."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _get_cause(reason: CheckpointException) -> str:
    """The reason in one line: torch wraps it in a traceback of every rank."""
    cause: BaseException = next((failure[0] for failure in reason.failures.values()), reason)
    return next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
