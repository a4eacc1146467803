"""Attention within short rows on a GPU, in Triton: one program computes a head of a whole row.

Flash attention works on 128 tokens at a time, so for rows of 30 it computes mostly masked scores. A
program here holds all scores of its row: no statistics are kept, gradients need no atomics, and
bits repeat. The tile fits the row: there is a launch for each size, in which other rows do nothing.
"""

# ruff: noqa: ANN001, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from rapidformer.compat.triton import compile_later


class _Tile(NamedTuple):
    """Rows longer than the first number and up to the second, and the warps of their programs."""

    least: int
    block: int
    warps: int

    @property
    def constants(self) -> dict[str, int]:
        return {"least": self.least, "block": self.block, "num_warps": self.warps}


_TILES = (_Tile(0, 32, 1), _Tile(32, 64, 4), _Tile(64, 128, 8))
_LENGTHS = ("heads", "shared", "before", "after", "limit")
"""Triton must not compile kernels for their values: compiling one takes half a second."""
_LOG2_E = tl.constexpr(1.4426950408889634)


def attend(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, seed: Tensor,
    longest: int, dropout: float, before: int, after: int, scale: float,
) -> Tensor:  # fmt: skip
    """As ``row_attention.attend_by_row``, on [tokens, heads, size]."""
    output = query.new_empty(query.shape)
    options = (ends, key_ends, seed, longest, dropout, before, after, scale)
    _launch(_attend, query.shape[1], (query, key, value, output), *options)
    return output


def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; the options are those of ``attend``."""
    of_query, of_key, of_value = (each.new_empty(each.shape) for each in (query, key, value))
    tensors = (query, key, value, gradient, of_query, of_key, of_value)
    _launch(_attend_backward, key.shape[1], tensors, *options)
    return of_query, of_key, of_value


class _Kind(NamedTuple):
    """What Triton compiles a kernel for, besides the tile."""

    kernel: Any
    device: torch.device
    dtype: torch.dtype
    size: int
    drops: bool
    slides: bool

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "size": self.size, "drops": self.drops, "slides": self.slides, "num_stages": 1
        }  # fmt: skip


_arguments: dict[_Kind, tuple[Any, ...]] = {}
"""Those of the first call of each kind, with types instead of tensors."""
_compiled: dict[tuple[_Kind, _Tile], Future[object]] = {}


def compile_with_dropout() -> None:
    """Compile what has run without dropout with it, too, in the background and for all tiles.

    That takes seconds, and training needs it as soon as its blocks are compiled.
    """
    for kind, arguments in list(_arguments.items()):
        _compile(kind._replace(drops=True), arguments, _TILES)


def _compile(kind: _Kind, arguments: tuple[Any, ...], tiles: Sequence[_Tile]) -> None:
    """Start compiling what is not compiled yet, for all these tiles at once."""
    _arguments.setdefault(kind, arguments)
    for tile in tiles:
        if (kind, tile) not in _compiled:
            work = functools.partial(
                kind.kernel.warmup, *arguments, grid=(1,), **tile.constants, **kind.constants
            )
            _compiled[kind, tile] = compile_later(work, kind.device)


def _launch(
    kernel: Any, heads_of_row: int, tensors: tuple[Tensor, ...], ends: Tensor, key_ends: Tensor,
    seed: Tensor, longest: int, dropout: float, before: int, after: int, scale: float,
) -> None:  # fmt: skip
    tensors = tuple(each if each.stride(-1) == 1 else each.contiguous() for each in tensors)
    heads, size = tensors[0].shape[1:]
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    arguments = (
        *tensors, *strides, ends, key_ends, seed, heads, heads // tensors[1].shape[1],
        before, after, min(round(dropout * 2**31), 2**31 - 1), scale, 1 / (1 - dropout),
    )  # fmt: skip
    kind = _Kind(
        kernel, tensors[0].device, tensors[0].dtype, size,
        drops=dropout > 0, slides=max(before, after) >= 0,
    )  # fmt: skip
    # A launch without work is not free: the programs of large tiles wait for each other.
    tiles = [tile for tile in _TILES if tile.least < longest]
    types = (each.dtype if isinstance(each, Tensor) else each for each in arguments)
    _compile(kind, tuple(types), tiles)
    for tile in tiles:
        _compiled[kind, tile].result()
        kernel[((len(ends) - 1) * heads_of_row,)](*arguments, **tile.constants, **kind.constants)


@triton.jit
def _mix(numbers):  # type: ignore[no-untyped-def]
    # As hash_bits in dist/seeding.py.
    numbers = (numbers ^ (numbers >> 16)) * 0x7FEB352D
    numbers = (numbers ^ (numbers >> 15)) * 0x846CA68B
    return numbers ^ (numbers >> 16)


@triton.jit
def _keep(seed, tokens, keys, heads, head, limit):  # type: ignore[no-untyped-def]
    # Which weights dropout keeps: by a hash of the seed, the query, its head and the key.
    queries = _mix(_mix((tokens * heads + head).to(tl.uint32)) ^ tl.load(seed).to(tl.uint32))
    # Both are hashes already, and high bits decide: half of ``_mix`` is enough to join them.
    numbers = (queries[:, None] ^ _mix(keys.to(tl.uint32) + 1)[None, :]) * 0x7FEB352D
    numbers = (numbers ^ (numbers >> 15)) * 0x846CA68B
    return (numbers >> 1).to(tl.int32) >= limit  # 31 bits: an argument of 32 has two types


@triton.jit  # type: ignore[untyped-decorator]
def _find(start, of_token, block: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    # Where the tokens of a row are, in 64 bits: [block, size].
    tokens = (start + tl.arange(0, block)).to(tl.int64)
    return tokens[:, None] * of_token + tl.arange(0, size)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _read(tensor, start, count, of_token, block: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    is_token = (tl.arange(0, block) < count)[:, None]
    return tl.load(tensor + _find(start, of_token, block, size), mask=is_token, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _write(tensor, tile, start, count, of_token, block: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    is_token = (tl.arange(0, block) < count)[:, None]
    tile = tile.to(tensor.dtype.element_ty)
    tl.store(tensor + _find(start, of_token, block, size), tile, mask=is_token)


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(q_tile, k_tile, keys, before, after, scale, block: tl.constexpr, slides: tl.constexpr):  # type: ignore[no-untyped-def]
    # The softmax of scores, in fp32: exponentials, and the inverse of each query's sum.
    rows, places = tl.arange(0, block)[:, None], tl.arange(0, block)[None, :]
    is_seen = places < keys
    if slides:
        is_seen &= (before < 0) | (places >= rows - before)
        is_seen &= (after < 0) | (places <= rows + after)
    scores = tl.dot(q_tile, tl.trans(k_tile)) * (scale * _LOG2_E)
    scores = tl.where(is_seen, scores, float("-inf"))
    largest = tl.max(scores, 1)
    weights = tl.exp2(scores - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    total = tl.sum(weights, 1)
    return weights, tl.where(total > 0, 1 / total, 0.0)


@triton.jit(do_not_specialize=_LENGTHS)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, output, q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    ends, key_ends, seed, heads, shared, before, after, limit, scale, kept_scale,
    least: tl.constexpr, block: tl.constexpr, size: tl.constexpr, drops: tl.constexpr,
    slides: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start, key_start = tl.load(ends + row), tl.load(key_ends + row)
    count, keys = tl.load(ends + row + 1) - start, tl.load(key_ends + row + 1) - key_start
    longest = tl.maximum(count, keys)
    if (longest > least) & (longest <= block):
        key_head = head // shared
        q_tile = _read(query + head * q_head, start, count, q_token, block, size)
        k_tile = _read(key + key_head * k_head, key_start, keys, k_token, block, size)
        v_tile = _read(value + key_head * v_head, key_start, keys, v_token, block, size)
        weights, inverse = _weigh(q_tile, k_tile, keys, before, after, scale, block, slides)
        if drops:
            places = tl.arange(0, block)
            is_kept = _keep(seed, start + places, places, heads, head, limit)
            weights = tl.where(is_kept, weights, 0.0)
            inverse *= kept_scale
        attended = tl.dot(weights.to(v_tile.dtype), v_tile) * inverse[:, None]
        _write(output + head * o_head, attended, start, count, o_token, block, size)


@triton.jit(do_not_specialize=_LENGTHS)  # type: ignore[untyped-decorator]
def _attend_backward(  # type: ignore[no-untyped-def]
    query, key, value, gradient, of_query, of_key, of_value,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head,
    dq_token, dq_head, dk_token, dk_head, dv_token, dv_head,
    ends, key_ends, seed, heads, shared, before, after, limit, scale, kept_scale,
    least: tl.constexpr, block: tl.constexpr, size: tl.constexpr, drops: tl.constexpr,
    slides: tl.constexpr,
):  # fmt: skip
    # One program for each head of keys: it adds up what the heads of queries that share it give.
    key_heads = heads // shared
    row, key_head = tl.program_id(0) // key_heads, tl.program_id(0) % key_heads
    start, key_start = tl.load(ends + row), tl.load(key_ends + row)
    count, keys = tl.load(ends + row + 1) - start, tl.load(key_ends + row + 1) - key_start
    longest = tl.maximum(count, keys)
    if (longest > least) & (longest <= block):
        k_tile = _read(key + key_head * k_head, key_start, keys, k_token, block, size)
        v_tile = _read(value + key_head * v_head, key_start, keys, v_token, block, size)
        key_sums = tl.zeros((block, size), tl.float32)
        value_sums = tl.zeros((block, size), tl.float32)
        for index in range(0, shared):
            head = key_head * shared + index
            q_tile = _read(query + head * q_head, start, count, q_token, block, size)
            g_tile = _read(gradient + head * g_head, start, count, g_token, block, size)
            weights, inverse = _weigh(q_tile, k_tile, keys, before, after, scale, block, slides)
            weights *= inverse[:, None]
            of_weights = tl.dot(g_tile, tl.trans(v_tile))
            used = weights
            if drops:
                places = tl.arange(0, block)
                is_kept = _keep(seed, start + places, places, heads, head, limit)
                factor = tl.where(is_kept, kept_scale, 0.0)
                used = weights * factor
                of_weights *= factor
            value_sums = tl.dot(tl.trans(used.to(g_tile.dtype)), g_tile, value_sums)
            mean = tl.sum(weights * of_weights, 1)
            of_scores = (weights * (of_weights - mean[:, None])).to(q_tile.dtype)
            sums = tl.dot(of_scores, k_tile) * scale
            _write(of_query + head * dq_head, sums, start, count, dq_token, block, size)
            key_sums = tl.dot(tl.trans(of_scores), q_tile, key_sums)
        of_key += key_head * dk_head
        _write(of_key, key_sums * scale, key_start, keys, dk_token, block, size)
        _write(of_value + key_head * dv_head, value_sums, key_start, keys, dv_token, block, size)
