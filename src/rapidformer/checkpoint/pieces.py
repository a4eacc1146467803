"""What each rank holds of the tensors, and what it writes of them to a file of its own.

The model's weights may go to safetensors files that ``from_pretrained`` reads. They are the only
copy of the weights: the index of the tensors leads into these files. Every rank writes one, of
whole tensors: what is split over ranks is joined on one of them, in turn. Without such files, there
is an index for torch's own tools, ``state/.metadata``, which is never read here.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
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
from rapidformer.dist.whole import find_strided_axis, get_shard, join_whole
from rapidformer.models.weight_files import name_dtype

_PREFIX = "model."


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


# ---- the model's own files -----------------------------------------------------------------------


def join_weights(tensors: dict[str, torch.Tensor]) -> None:
    """Make split weights whole, each in one rank's host memory; every rank must call this."""
    weights = [(name, t) for name, t in tensors.items() if name.startswith(_PREFIX)]
    for number, (name, tensor) in enumerate(weights):
        if isinstance(tensor, DTensor):
            ranks = tensor.device_mesh.mesh.flatten().tolist()
            whole = join_whole(tensor)
            del tensors[name]
            if get_rank() == ranks[number % len(ranks)]:
                tensors[name] = whole.cpu()


def belongs_to_model(piece: Piece) -> bool:
    """Whether a piece is a whole weight, of a type that safetensors has."""
    is_whole = tuple(piece.data.shape) == piece.shape
    return piece.name.startswith(_PREFIX) and is_whole and name_dtype(piece.data.dtype) is not None


def name_model_file(rank: int, world_size: int) -> str:
    """The file that a rank writes."""
    return (
        "model.safetensors"
        if world_size == 1
        else f"model-{rank + 1:05d}-of-{world_size:05d}.safetensors"
    )


def write_model_file(
    pieces: Sequence[Piece], path: Path, check: Callable[[], None] = lambda: None
) -> tuple[Index, Digest]:
    """Write whole weights under their own names; ``check`` may raise between two of them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        start, end = end, end + piece.data.nbytes
        header[piece.name.removeprefix(_PREFIX)] = {
            "dtype": name_dtype(piece.data.dtype),
            "shape": piece.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    index: Index = {}
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            check()
            data = piece.data.detach().cpu().as_subclass(torch.Tensor).contiguous()
            part = Part(piece.offsets, piece.shape, f"../{path.name}", file.tell(), data.nbytes)
            index[piece.name] = Entry(data.dtype, piece.shape, [part])
            file.write(data.reshape(-1).view(torch.uint8).numpy())
    return index, file.digest


def write_weight_map(index: Index, folder: Path) -> None:
    """Say which weight is in which of several files, as ``from_pretrained`` wants it."""
    parts = {
        name.removeprefix(_PREFIX): entry.parts[0]
        for name, entry in sorted(index.items())
        if is_model_file(entry.parts[0].file)
    }
    content = {
        "metadata": {"total_size": sum(part.length for part in parts.values())},
        "weight_map": {name: Path(part.file).name for name, part in parts.items()},
    }
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
