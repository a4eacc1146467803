"""``state/.metadata``: a checkpoint's index for torch's own tools; it is never read here."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata

from rapidformer.checkpoint.index import Index
from rapidformer.compat.torch_distributed import build_place


def to_metadata(index: Index) -> metadata.Metadata:
    """The index as torch's checkpoints know it."""
    return metadata.Metadata(
        state_dict_metadata={
            name: metadata.TensorStorageMetadata(
                properties=metadata.TensorProperties(dtype=entry.dtype),
                size=torch.Size(entry.shape),
                chunks=[
                    metadata.ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
                    for part in entry.parts
                ],
            )
            for name, entry in index.items()
        },
        storage_data={
            metadata.MetadataIndex(name, torch.Size(part.offsets)): build_place(
                part.file, part.start, part.length
            )
            for name, entry in index.items()
            for part in entry.parts
        },
        planner_data={name: (name,) for name in index},
    )


def write_torch_index(index: Index, folder: Path) -> None:
    """Write the index for torch's own tools."""
    (folder / ".metadata").write_bytes(pickle.dumps(to_metadata(index), protocol=4))
