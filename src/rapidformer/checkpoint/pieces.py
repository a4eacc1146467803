"""What each rank holds of the tensors, and what it writes of them to a file of its own.

Also an index for torch's own tools, ``state/.metadata``, which is never read here.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.tensor import DTensor, Replicate

from rapidformer.checkpoint.index import Entry, Index, Part, Sizes, is_model_file, write_index
from rapidformer.checkpoint.publish import Digest, HashedFile
from rapidformer.checkpoint.state import get_rank
from rapidformer.compat.torch_distributed import build_place, find_offset
from rapidformer.dist.collectives import gather_from_all
from rapidformer.dist.whole import find_strided_axis, get_shard


@dataclass(kw_only=True)
class Piece:
    """A part of a tensor that this rank holds."""

    name: str
    shape: Sizes
    """The whole tensor's."""
    offsets: Sizes
    data: torch.Tensor


def cut(name: str, tensor: torch.Tensor) -> list[Piece]:
    """The parts of a tensor that this rank holds; they share its memory."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return [Piece(name=name, shape=shape, offsets=(0,) * len(shape), data=tensor.detach())]
    mesh, own, placements = tensor.device_mesh, get_shard(tensor).detach(), list(tensor.placements)
    if mesh.get_coordinate() is None:
        return []
    axis = find_strided_axis(tensor)
    if axis is None:
        offsets = find_offset(tensor.shape, mesh, placements)
        return [Piece(name=name, shape=shape, offsets=offsets, data=own)]
    # A fused weight (query, key and value side by side) is split by heads, so each rank has a piece
    # of each part.
    strided: Any = placements[axis]
    placements[axis] = Replicate()
    start = find_offset(tensor.shape, mesh, placements)
    dim, parts, rank = strided.dim, strided.split_factor, mesh.get_local_rank(axis)
    pieces = []
    for part, data in enumerate(own.chunk(parts, dim)):
        place = part * (shape[dim] // parts) + rank * data.shape[dim]
        offsets = (*start[:dim], place, *start[dim + 1 :])
        pieces.append(Piece(name=name, shape=shape, offsets=offsets, data=data))
    return pieces


def plan_pieces(tensors: dict[str, torch.Tensor]) -> list[Piece]:
    """What this rank writes of its tensors; every rank must call this.

    Of a piece that several ranks hold, one with little to write so far.
    """
    held = [piece for name, tensor in tensors.items() for piece in cut(name, tensor)]
    everyone = gather_from_all([(one.name, one.offsets, one.data.nbytes) for one in held])
    holders: dict[tuple[str, Sizes, int], list[int]] = defaultdict(list)
    for rank, keys in enumerate(everyone):
        for key in keys:
            holders[key].append(rank)
    loads: Counter[int] = Counter()
    mine: set[tuple[str, Sizes]] = set()
    for (name, offsets, size), ranks in holders.items():
        writer = min(ranks, key=loads.__getitem__)
        loads[writer] += size
        if writer == get_rank():
            mine.add((name, offsets))
    return [piece for piece in held if (piece.name, piece.offsets) in mine]


def write_pieces(
    pieces: Iterable[Piece], path: Path, check: Callable[[], None] = lambda: None
) -> tuple[Index, Digest]:
    """Write this rank's pieces to a file of its own; ``check`` may raise between two of them."""
    index: Index = {}
    with HashedFile(path) as file:
        for piece in pieces:
            check()
            start = file.tell()
            data = piece.data.detach().cpu().as_subclass(torch.Tensor)
            if data.untyped_storage().nbytes() != data.nbytes:
                data = data.clone()  # torch saves all of the memory under a view
            torch.save(data, file)
            entry = index.setdefault(piece.name, Entry(data.dtype, piece.shape, []))
            length = file.tell() - start
            entry.parts.append(Part(piece.offsets, tuple(data.shape), path.name, start, length))
    return index, file.digest


def finish_tensors(indexes: Iterable[Index], folder: Path) -> Index:
    """Write the index of what all ranks have written, and return it."""
    joined: Index = {}
    for index in indexes:
        for name, entry in index.items():
            joined.setdefault(name, replace(entry, parts=[])).parts.extend(entry.parts)
    write_index(joined, folder)
    if not any(is_model_file(part.file) for entry in joined.values() for part in entry.parts):
        # torch's own tools read no other files.
        (folder / ".metadata").write_bytes(pickle.dumps(_to_metadata(joined), protocol=4))
    return joined


def _to_metadata(index: Index) -> metadata.Metadata:
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
