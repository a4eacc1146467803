"""Tensors to and from disk through ``torch.distributed.checkpoint``; each rank writes its part.

Only tensors go there; everything else is JSON. torch reads its index (``.metadata``) by unpickling,
so our reader admits the index's own classes and refuses anything else.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rapidformer.checkpoint.index import check_index
from rapidformer.checkpoint.strided import split_strided
from rapidformer.compat.torch_checkpoint import PRIVATE_INDEX_NAMES
from rapidformer.dist.topology import Topology
from rapidformer.errors import CheckpointError

# Each class by name: admitting a whole module would admit whatever it imports (`os`, say).
_ALLOWED_NAMES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
    *PRIVATE_INDEX_NAMES,
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
}


def save_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the tensors; every rank must call this, with those it has a part of."""
    try:
        with _quiet():
            pieces = {name: split_strided(tensor) for name, tensor in tensors.items()}
            save(pieces, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as reason:
        raise CheckpointError(f"{folder} cannot be written: {_get_cause(reason)}") from None


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
    metadata = _Reader(folder).read_metadata()
    return {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_index(folder: Path) -> Metadata:
    """The index of a folder's tensors; what it says is not checked yet."""
    path = folder / ".metadata"
    try:
        if not path.is_file():
            raise FileNotFoundError("no such file")
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except Exception as reason:  # damaged bytes can make the unpickler fail in any way
        raise CheckpointError(f"{path} cannot be read: {reason}") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} is not the index of a checkpoint.")
    return metadata


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_index(Path(self.path))
        check_index(metadata, Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")


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
