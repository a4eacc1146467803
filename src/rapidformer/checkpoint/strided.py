"""Checkpoint tensors of which a rank holds several separate pieces.

A fused weight (query, key and value side by side) is split by heads, so each rank has a piece of
each part. torch's checkpoints treat a DTensor as one piece; here its pieces are listed one by one,
and the file looks as if one process had written it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate

from rapidformer.compat.torch_distributed import find_offset
from rapidformer.compat.torch_tensors import build_shell
from rapidformer.dist.whole import find_strided_axis


@dataclass(frozen=True)
class _Piece:
    offsets: torch.Size
    data: torch.Tensor


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
    local = tensor.to_local().detach()
    pieces = []
    for part, data in enumerate(local.chunk(parts, dim)):
        offsets = list(start)
        offsets[dim] = part * width + mesh.get_local_rank(axis) * data.shape[dim]
        pieces.append(_Piece(torch.Size(offsets), data))
    return PiecewiseTensor(tensor.shape, pieces)


class PiecewiseTensor(torch.Tensor):
    """What torch's checkpoints ask of a tensor, and nothing else."""

    _pieces: list[_Piece]

    @staticmethod
    def __new__(cls: Any, shape: torch.Size, pieces: list[_Piece]) -> PiecewiseTensor:
        self: PiecewiseTensor = build_shell(cls, shape, pieces[0].data)
        self._pieces = pieces
        return self

    def __init__(self, shape: torch.Size, pieces: list[_Piece]) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} on a tensor that is only there to be saved or loaded")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=piece.offsets, sizes=piece.data.size()),
                    properties=TensorProperties.create_from_tensor(piece.data),
                    size=self.size(),
                ),
            )
            for piece in self._pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=piece.offsets, sizes=piece.data.size())
            for piece in self._pieces
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(piece.data for piece in self._pieces if piece.offsets == index.offset)
