"""The sum of squares of many tensors: two launches, and the same result run after run."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from rapidformer.compat.triton import has_triton, on_device, works_later
from rapidformer.optim.multi_tensor.launch import Addresses
from rapidformer.optim.multi_tensor.tables import (
    HOST,
    TYPES,
    are_plain,
    build_chunks,
    is_recording,
    send,
)

_CHUNK, _BLOCK, _WARPS = 32768, 2048, 4
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


def sum_squares(tensors: Sequence[Tensor]) -> Tensor | None:
    """The sum of all squares in fp64, in a fixed order; None if the kernels cannot compute it."""
    device = tensors[0].device
    if not has_triton(device) or not are_plain(tensors):
        return None
    if any(tensor.device != device for tensor in tensors):
        return None
    with on_device(device):
        parts = _find_parts(tensors)
        return None if parts is None else _add_up(tensors, parts)


def _add_up(tensors: Sequence[Tensor], parts: list[_Part]) -> Tensor:
    from rapidformer.optim.multi_tensor import kernel

    device = tensors[0].device
    counts = [len(part.chunks) for part in parts]
    partial = torch.empty(max(sum(counts), 1), dtype=torch.float32, device=device)
    total = torch.empty((), dtype=torch.float64, device=device)
    start = 0
    for part, count in zip(parts, counts, strict=True):
        addresses = part.addresses.write([tensors[i].data_ptr() for i in part.numbers])
        kernel.square_chunk[(count,)](
            part.chunks, addresses, part.sizes, partial[start:], kernel.TYPES[part.dtype],
            _CHUNK, _BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        start += count
    kernel.add_up[(1,)](partial, total, start, _SUM_BLOCK, num_warps=_SUM_WARPS)
    return total


def _find_parts(tensors: Sequence[Tensor]) -> list[_Part] | None:
    device = tensors[0].device
    dtypes, sizes = tuple(t.dtype for t in tensors), tuple(map(Tensor.numel, tensors))
    key = device, dtypes, sizes
    parts = _tables.get(key)
    if parts is None:
        if is_recording(device) or not all(_works(device, dtype) for dtype in set(dtypes)):
            return None
        if len(_tables) == _MOST_TABLES:
            del _tables[next(iter(_tables))]
        parts = _tables[key] = _build_parts(*key)
    if is_recording(device):
        _recorded[key] = parts
    return parts


def _build_parts(
    device: torch.device, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]
) -> list[_Part]:
    parts = []
    for dtype in dict.fromkeys(dtypes):
        numbers = [i for i, other in enumerate(dtypes) if other == dtype and sizes[i]]
        if numbers:
            lengths = [sizes[i] for i in numbers]
            chunks = send(build_chunks(lengths, _CHUNK), device)
            on_device = send(torch.tensor(lengths, device=HOST), device)
            parts.append(_Part(dtype, numbers, chunks, on_device, Addresses(device)))
    return parts


def start_trials(tensors: Iterable[Tensor]) -> None:
    """Compile the kernels for such tensors in the background."""
    for device, dtype in {(tensor.device, tensor.dtype) for tensor in tensors}:
        if has_triton(device) and dtype in TYPES:
            _start_trial(device, dtype)


def _works(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in TYPES and _start_trial(device, dtype).result()


@functools.cache
def _start_trial(device: torch.device, dtype: torch.dtype) -> Future[bool]:
    def trial() -> None:
        ones = torch.ones(19, dtype=dtype, device=device)
        total = float(_add_up([ones], _build_parts(device, (dtype,), (19,))))
        if total != 19:
            raise RuntimeError(f"19 squares of 1 gave {total:g}")

    return works_later("the gradient's norm", device, trial)
