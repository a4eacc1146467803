"""What each rank writes of the tensors, as ``torch.distributed.checkpoint`` plans it.

Also an index for torch's own tools, ``state/.metadata``, which is never read here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate

from rapidformer.checkpoint.index import Entry, Index, Part, Sizes, is_model_file, write_index
from rapidformer.checkpoint.publish import Digest, HashedFile
from rapidformer.compat.torch_distributed import build_place, find_offset
from rapidformer.compat.torch_tensors import build_shell
from rapidformer.dist.collectives import gather_on_first, scatter_from_first
from rapidformer.dist.whole import find_strided_axis


@dataclass(kw_only=True)
class Piece:
    """A part of a tensor that this rank writes."""

    name: str
    shape: Sizes
    """The whole tensor's."""
    offsets: Sizes
    data: torch.Tensor


def plan_pieces(tensors: dict[str, torch.Tensor]) -> list[Piece]:
    """What this rank writes of its tensors, sharing their memory; every rank must call this."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    whole: dict[str, Any] = {name: split_strided(tensor) for name, tensor in tensors.items()}
    planner.set_up_planner(whole)
    plans = gather_on_first(planner.create_local_plan())
    if plans is not None:
        plans, _ = planner.create_global_plan(plans)
    plan = planner.finish_plan(scatter_from_first(plans))
    pieces = []
    for item in plan.items:
        data, place = planner.resolve_data(item), item.tensor_data
        assert isinstance(data, torch.Tensor) and place is not None
        shape, offsets = tuple(place.size), tuple(place.chunk.offsets)
        pieces.append(Piece(name=item.index.fqn, shape=shape, offsets=offsets, data=data.detach()))
    return pieces


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
        write_torch_index(joined, folder)  # torch's own tools read no other files
    return joined


# ---- tensors of which a rank holds several separate pieces ---------------------------------------
#
# A fused weight (query, key and value side by side) is split by heads, so each rank has a piece of
# each part. torch's checkpoints treat a DTensor as one piece; here its pieces are listed one by
# one, and the file looks as if one process had written it.


def split_strided(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as its pieces, which share its memory; any other tensor unchanged."""
    axis = find_strided_axis(tensor)
    if axis is None:
        return tensor
    assert isinstance(tensor, DTensor)
    placement: Any = tensor.placements[axis]
    dim, parts = placement.dim, placement.split_factor
    mesh = tensor.device_mesh
    others = [Replicate() if i == axis else p for i, p in enumerate(tensor.placements)]
    start = find_offset(tensor.shape, mesh, others)
    width = tensor.shape[dim] // parts
    pieces: dict[torch.Size, torch.Tensor] = {}
    for part, data in enumerate(tensor.to_local().detach().chunk(parts, dim)):
        offsets = list(start)
        offsets[dim] = part * width + mesh.get_local_rank(axis) * data.shape[dim]
        pieces[torch.Size(offsets)] = data
    return _PiecewiseTensor(tensor.shape, pieces)


class _PiecewiseTensor(torch.Tensor):
    """What torch's checkpoints ask of a tensor, and nothing else."""

    _pieces: dict[torch.Size, torch.Tensor]
    """By their offsets."""

    @staticmethod
    def __new__(
        cls: Any, shape: torch.Size, pieces: dict[torch.Size, torch.Tensor]
    ) -> _PiecewiseTensor:
        self: _PiecewiseTensor = build_shell(cls, shape, next(iter(pieces.values())))
        self._pieces = pieces
        return self

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} on a tensor that is only there to be saved or loaded")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=metadata.MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=metadata.TensorProperties.create_from_tensor(data),
                    size=self.size(),
                ),
            )
            for chunk, data in zip(self.__create_chunk_list__(), self._pieces.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        return [
            metadata.ChunkStorageMetadata(offsets=offsets, sizes=data.size())
            for offsets, data in self._pieces.items()
        ]

    def __get_tensor_shard__(self, index: metadata.MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._pieces[index.offset]


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
