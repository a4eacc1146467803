"""The sum of squares of many tensors: two launches, and the same result run after run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rapidformer.optim.multi_tensor.addresses import Addresses
from rapidformer.optim.multi_tensor.tables import (
    build_chunks,
    has_triton,
    is_recording,
    send,
)

TYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK, _BLOCK, _WARPS = 32768, 4096, 8
_SUM_BLOCK, _SUM_WARPS = 4096, 8
_MOST_TABLES = 16

Key = tuple[torch.device, tuple[torch.dtype, ...], tuple[int, ...]]


@dataclass
class _Part:
    """Tensors of one dtype."""

    dtype: torch.dtype
    numbers: list[int]
    """Which of all tensors these are."""
    chunks: Tensor
    sizes: Tensor
    addresses: Addresses


_tables: dict[Key, list[_Part]] = {}
_recorded: dict[Key, list[_Part]] = {}
"""Those that a CUDA graph reads: they stay."""


def can_sum_squares(tensors: Sequence[Tensor]) -> bool:
    """Whether ``sum_squares`` can be called for these tensors."""
    device = tensors[0].device
    return (
        has_triton(device)
        and all(map(Tensor.is_contiguous, tensors))
        and all(t.dtype in TYPES and t.device == device for t in tensors)
        and not (is_recording(device) and _get_key(tensors) not in _tables)
    )


def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements, in fp64; squares are added up in fp32 by chunks."""
    from rapidformer.optim.multi_tensor import kernel

    device = tensors[0].device
    parts = _find_parts(tensors)
    counts = [len(part.chunks) for part in parts]
    partial = torch.empty(max(sum(counts), 1), dtype=torch.float32, device=device)
    start = 0
    for part, count in zip(parts, counts, strict=True):
        addresses = part.addresses.write([tensors[i].data_ptr() for i in part.numbers])
        kernel.square_chunk[(count,)](
            part.chunks, addresses, part.sizes, partial[start:], kernel.TYPES[part.dtype],
            _CHUNK, _BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        start += count
    total = torch.empty((), dtype=torch.float64, device=device)
    kernel.add_up[(1,)](partial, total, start, _SUM_BLOCK, num_warps=_SUM_WARPS)
    return total


def _get_key(tensors: Sequence[Tensor]) -> Key:
    sizes = tuple(map(Tensor.numel, tensors))
    return tensors[0].device, tuple(tensor.dtype for tensor in tensors), sizes


def _find_parts(tensors: Sequence[Tensor]) -> list[_Part]:
    key = _get_key(tensors)
    if key not in _tables:
        if len(_tables) == _MOST_TABLES:
            del _tables[next(iter(_tables))]
        _tables[key] = _build_parts(*key)
    if is_recording(key[0]):
        _recorded[key] = _tables[key]
    return _tables[key]


def _build_parts(
    device: torch.device, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]
) -> list[_Part]:
    parts = []
    for dtype in dict.fromkeys(dtypes):
        numbers = [i for i, own in enumerate(dtypes) if own == dtype and sizes[i]]
        if not numbers:
            continue
        own = [sizes[i] for i in numbers]
        parts.append(
            _Part(
                dtype,
                numbers,
                send(build_chunks(own, _CHUNK), device),
                send(torch.tensor(own), device),
                Addresses(device),
            )
        )
    return parts
