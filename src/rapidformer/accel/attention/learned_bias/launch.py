"""What the Triton kernels share: how they take tensors, a program's tile, and dropout."""

# ruff: noqa: ANN001, ANN201, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton import language as tl

from rapidformer.accel.attention.learned_bias.call import ALIGNMENT, Call, allocate_kept, round_up

LENGTHS = ("batch", "heads", "queries", "keys")
"""Parameters that change from batch to batch: Triton must not compile kernels for their values.

They are not in a tuple because Triton ignores ``do_not_specialize`` for the numbers in tuples.
"""
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_ALL = 1 << 16
"""The probability of dropout is rounded to a multiple of 1/65,536."""


class Strided(NamedTuple):
    """A tensor [batch, heads, rows, columns] with adjacent columns, and its other strides."""

    start: Any
    """The tensor; in a kernel, its address."""
    batch: int
    head: int
    row: int


class Tile(NamedTuple):
    """How many queries and keys a program works on at once, and with how many warps and stages."""

    queries: int
    keys: int
    warps: int
    stages: int


class Arguments(NamedTuple):
    """A call, as the kernels of both passes take it."""

    query: Strided
    key: Strided
    value: Strided
    bias: Strided
    seen: Strided | None
    kept: Strided | None
    scale: float
    kept_scale: float
    lowest: float
    """The bias of hidden keys, as in transformers."""


def get_arguments(call: Call) -> Arguments:
    """The tensors and factors of a call."""
    seen, kept = call.seen, call.kept
    return Arguments(
        query=get_strided(call.query), key=get_strided(call.key), value=get_strided(call.value),
        bias=_get_shared(call.bias, -math.inf),
        seen=None if seen is None else _get_shared(seen.view(torch.uint8), 1),
        kept=None if kept is None else get_strided(kept.view(*call.query.shape[:3], -1)),
        scale=call.scale, kept_scale=_ALL / _count_kept(call.dropout) if call.dropout else 1.0,
        lowest=torch.finfo(call.query.dtype).min,
    )  # fmt: skip


def get_strided(tensor: Tensor) -> Strided:
    """A tensor for a kernel."""
    batch, head, row, _ = tensor.stride()
    return Strided(tensor, batch, head, row)


def _get_shared(tensor: Tensor, fill: float) -> Strided:
    """A bias or mask, its rows padded with ``fill``; a shared dimension has stride 0."""
    for dimension in range(3):
        if tensor.stride(dimension) == 0:  # expanded: a copy would be as large as it looks
            tensor = tensor.narrow(dimension, 0, 1)
    columns = tensor.shape[-1]
    if columns % ALIGNMENT:
        tensor = functional.pad(tensor, (0, round_up(columns) - columns), value=fill)
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    batch, head, row, _ = (0 if length == 1 else stride for length, stride in strides)
    return Strided(tensor, batch, head, row)


def launch(
    kernel: Any, tokens: int, block: int, call: Call, /, *arguments: Any, **options: Any
) -> None:
    """Run a kernel with one program for each block of tokens, in every head of every row."""
    batch, heads, queries, size = call.query.shape
    kernel[(triton.cdiv(tokens, block) * batch * heads,)](
        *arguments, batch=batch, heads=heads, queries=queries, keys=call.keys, size=size, **options
    )


def draw(seed: Tensor, rows: int, keys: int, dropout: float) -> Tensor:
    """Which weights dropout keeps, one bit for each: [rows, bytes].

    Bit ``i`` of byte ``j`` in a group of 512 keys belongs to key ``64 i + j``. So a tile of 64 keys
    reads 64 adjacent bytes and tests the same bit of each.
    """
    kept = allocate_kept(seed, rows, keys)
    words = kept.view(torch.int32)
    block = 512
    _draw[(triton.cdiv(words.numel(), block),)](
        seed, words, words.numel(), _count_kept(dropout), block=block, num_warps=4
    )
    return kept


def _count_kept(dropout: float) -> int:
    """How many of 65,536 weights are kept."""
    return min(max(round((1 - dropout) * _ALL), 1), _ALL - 1)


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
def find_tile(tokens, batch, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """First token, row and head of this program's tile; neighbours share keys, values and bias."""
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens, block)
    row = ((program // tiles) % batch).to(tl.int64)
    head = (program // tiles // batch).to(tl.int64)
    return (program % tiles) * block, row, head


@triton.jit
def find_head(tensor, row, head):  # type: ignore[no-untyped-def]
    """The address of one head of one row."""
    return tensor.start + (row * tensor.batch + head * tensor.head)


@triton.jit
def pad_length(length):  # type: ignore[no-untyped-def]
    """``call.round_up``, written so that Triton sees a multiple of 16, and loads as much."""
    return tl.cdiv(length, _ALIGNMENT) * _ALIGNMENT


@triton.jit
def find_statistics(row, head, heads, queries):  # type: ignore[no-untyped-def]
    """Where the statistics of a head start."""
    return (row * heads + head) * pad_length(queries)


@triton.jit
def load_bias(call, row, head, queries, keys, mask):  # type: ignore[no-untyped-def]
    """A tile of the bias with hidden keys; ``queries`` and ``keys`` are two-dimensional."""
    bias = find_head(call.bias, row, head) + (queries * call.bias.row + keys)
    tile = tl.load(bias, mask=mask, other=float("-inf")).to(tl.float32)
    if call.seen is not None:
        seen = find_head(call.seen, row, head) + (queries * call.seen.row + keys)
        tile = tl.where(tl.load(seen, mask=mask, other=1) != 0, tile, call.lowest)
    return tile


@triton.jit
def load_kept(call, row, head, queries, keys, mask):  # type: ignore[no-untyped-def]
    """Which weights of a tile dropout keeps."""
    byte = keys // 512 * 64 + keys % 64
    kept = find_head(call.kept, row, head) + (queries * call.kept.row + byte)
    return (tl.load(kept, mask=mask, other=0).to(tl.int32) >> (keys // 64 % 8)) & 1 != 0
