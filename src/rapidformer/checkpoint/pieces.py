"""What each rank writes of the tensors: planned together, written and hashed by each on its own.

``torch.distributed.checkpoint`` plans who writes what, so that of several replicas each writes a
part; the files are such as it would write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from rapidformer.checkpoint.hashing import Digest, HashedFile
from rapidformer.checkpoint.index import Entry, Part, Sizes, write_index
from rapidformer.checkpoint.strided import split_strided
from rapidformer.checkpoint.torch_index import write_torch_index
from rapidformer.dist.collectives import gather_on_first, scatter_from_first


@dataclass(kw_only=True)
class Piece:
    """A part of a tensor that this rank writes."""

    name: str
    shape: Sizes
    """The whole tensor's."""
    offsets: Sizes
    data: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class WrittenPiece:
    """Where a piece was written."""

    name: str
    dtype: torch.dtype
    shape: Sizes
    part: Part


def plan_pieces(tensors: dict[str, torch.Tensor]) -> list[Piece]:
    """What this rank writes; every rank must call this, with the tensors it has a part of.

    The pieces share the tensors' memory.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False)
    whole: dict[str, Any] = {name: split_strided(tensor) for name, tensor in tensors.items()}
    planner.set_up_planner(whole)
    plans = gather_on_first(planner.create_local_plan())
    if plans is not None:
        plans, _ = planner.create_global_plan(plans)
    plan = planner.finish_plan(scatter_from_first(plans))
    pieces = []
    for item in plan.items:
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor) and item.tensor_data is not None
        pieces.append(
            Piece(
                name=item.index.fqn,
                shape=tuple(item.tensor_data.size),
                offsets=tuple(item.tensor_data.chunk.offsets),
                data=data.detach(),
            )
        )
    return pieces


def write_pieces(
    pieces: Iterable[Piece], folder: Path, rank: int, check: Callable[[], None] = lambda: None
) -> tuple[list[WrittenPiece], Digest]:
    """Write this rank's pieces to a file of its own, and hash it on the way to the disk.

    ``check`` may raise between two pieces.
    """
    written = []
    path = folder / f"__{rank}_0.distcp"
    with HashedFile(path) as file:
        for piece in pieces:
            check()
            start = file.tell()
            data = _to_host(piece.data)
            torch.save(data, file)
            part = Part(
                offsets=piece.offsets,
                sizes=tuple(data.shape),
                file=path.name,
                start=start,
                length=file.tell() - start,
            )
            written.append(
                WrittenPiece(name=piece.name, dtype=data.dtype, shape=piece.shape, part=part)
            )
    return written, file.digest


def _to_host(data: torch.Tensor) -> torch.Tensor:
    """A plain tensor in host memory: torch saves all of the memory under a view."""
    found = data.detach().cpu().as_subclass(torch.Tensor)
    is_view = found.untyped_storage().nbytes() != found.nbytes
    return found.clone() if is_view else found


def finish_tensors(pieces: Iterable[WrittenPiece], folder: Path) -> None:
    """Write the index of what all ranks have written."""
    found: dict[str, list[WrittenPiece]] = defaultdict(list)
    for piece in pieces:
        found[piece.name].append(piece)
    index = {
        name: Entry(
            dtype=members[0].dtype,
            shape=members[0].shape,
            parts=tuple(piece.part for piece in members),
        )
        for name, members in found.items()
    }
    write_index(index, folder)
    write_torch_index(index, folder)
