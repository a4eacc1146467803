"""A checkpoint's weights as safetensors files that ``from_pretrained`` reads.

They are the only copy of the weights: the index of the tensors leads into these files. Every rank
writes one, of whole tensors: what is split over ranks is joined on one of them, in turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rapidformer.checkpoint.index import Entry, Index, Part, is_model_file
from rapidformer.checkpoint.pieces import Piece
from rapidformer.checkpoint.publish import Digest, HashedFile
from rapidformer.checkpoint.state import get_rank
from rapidformer.dist.whole import join_whole
from rapidformer.models.weight_files import name_dtype

_PREFIX = "model."


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
