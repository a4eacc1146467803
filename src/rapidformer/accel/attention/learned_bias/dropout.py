"""Which attention weights dropout keeps: one bit for each, drawn in Triton.

Import this module only if Triton is installed; torch's CPU builds come without it.
"""

# ruff: noqa: ANN001, ANN201, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

_ALL = 1 << 16
"""The probability is rounded to a multiple of 1/65,536."""


def get_kept(dropout: float) -> int:
    """How many of 65,536 weights are kept."""
    return min(max(round((1 - dropout) * _ALL), 1), _ALL - 1)


def get_kept_scale(dropout: float) -> float:
    """What a kept weight is multiplied by."""
    return _ALL / get_kept(dropout) if dropout else 1.0


def get_row_bytes(keys: int) -> int:
    """The length of a row of bits: 64 bytes for each 512 keys."""
    return (keys + 511) // 512 * 64


def draw(seed: Tensor, rows: int, keys: int, dropout: float) -> Tensor:
    """Which weights dropout keeps, one bit for each: [rows, bytes].

    Bit ``i`` of byte ``j`` in a group of 512 keys belongs to key ``64 i + j``. So a tile of 64 keys
    reads 64 adjacent bytes and tests the same bit of each.
    """
    kept = torch.empty(rows, get_row_bytes(keys), dtype=torch.uint8, device=seed.device)
    words = kept.view(torch.int32)
    block = 512
    _draw[(triton.cdiv(words.numel(), block),)](
        seed, words, words.numel(), get_kept(dropout), block=block, num_warps=4
    )
    return kept


@triton.jit  # type: ignore[untyped-decorator]
def _draw(seed, words, count, limit, block: tl.constexpr):  # type: ignore[no-untyped-def]
    # Each word has one bit of 32 random 16-bit numbers, so 32 numbers at a time are compared with
    # the limit, from their lowest bit to their highest.
    places = tl.program_id(0) * block + tl.arange(0, block)
    start = tl.load(seed)
    is_below = tl.zeros((block,), tl.int32)
    for part in tl.static_range(4):
        bits = tl.randint4x(start, places * 4 + part)
        for index in tl.static_range(4):
            random = bits[index].to(tl.int32, bitcast=True)
            is_one = (limit >> (part * 4 + index)) & 1
            is_below = tl.where(is_one != 0, is_below | random, is_below & random)
    tl.store(words + places, is_below, mask=places < count)


@triton.jit  # type: ignore[untyped-decorator]
def get_byte(places):  # type: ignore[no-untyped-def]
    """The byte of a row that has the bits of these keys."""
    return places // 512 * 64 + places % 64


@triton.jit  # type: ignore[untyped-decorator]
def get_bit(places):  # type: ignore[no-untyped-def]
    """Which bit of its byte belongs to a key."""
    return places // 64 % 8
