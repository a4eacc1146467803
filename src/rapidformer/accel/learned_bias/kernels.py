"""Attention with a bias on the scores, forward and backward, in Triton.

The forward pass goes over the keys in tiles and keeps a running softmax, so no [queries, keys]
tensor is written. The backward pass writes the gradient of the scores once, in 16 bits: the
gradients of the queries and of the bias are both sums over it. Nothing is added atomically, so two
runs give the same bits.

Import this module only if Triton is installed; torch's CPU builds come without it.
"""

# ruff: noqa: ANN001, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_TILE = tl.constexpr(64)
_BITS = tl.constexpr(8)
_RANDOM_BITS = 16
"""Dropout is rounded to a multiple of 2 ** -16."""


def get_groups(keys: int) -> int:
    """How many groups of 512 keys a row of dropout bits has."""
    return -(-keys // 512)


def get_kept(dropout: float) -> int:
    """How many of 65,536 weights dropout keeps."""
    most = 1 << _RANDOM_BITS
    return min(max(round((1 - dropout) * most), 1), most - 1)


def get_kept_scale(dropout: float) -> float:
    """What dropout multiplies the weights it keeps by."""
    return (1 << _RANDOM_BITS) / get_kept(dropout) if dropout else 1.0


def draw(seed: Tensor, rows: int, keys: int, dropout: float) -> Tensor:
    """Which weights dropout keeps, one bit for each: [rows, groups * 64] bytes.

    Bit ``i`` of byte ``j`` in a group of 512 keys is key ``64 i + j``. So the bits of a tile of 64
    keys are in 64 adjacent bytes, and no thread has to unpack a byte for others.
    """
    kept = torch.empty(rows, get_groups(keys) * 64, dtype=torch.uint8, device=seed.device)
    words = kept.view(torch.int32)
    block = 512
    _draw[(triton.cdiv(words.numel(), block),)](
        seed, words, words.numel(), get_kept(dropout), block=block, num_warps=4
    )
    return kept


@triton.jit  # type: ignore[untyped-decorator]
def _draw(seed, words, count, limit, block: tl.constexpr):  # type: ignore[no-untyped-def]
    # Compare 32 random numbers of 16 bits with one limit at a time: a word has one bit of each.
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


# ---- forward -------------------------------------------------------------------------------------


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    kept: Tensor | None,
    output: Tensor,
    statistics: Tensor,
    scale: float,
    kept_scale: float,
    *,
    is_causal: bool,
) -> None:
    """Fill ``output``, and ``statistics`` [2, batch, heads, queries] for the backward pass.

    The statistics are the largest score of a row and the reciprocal of its sum of exponentials.
    Their logarithms added up would be lost in a row whose keys are all masked: there, the largest
    score is the smallest number of the bias's type.
    """
    batch, heads, queries, size = query.shape
    block_q, block_k, warps, stages = FORWARD[size]
    grid = (triton.cdiv(queries, block_q) * batch * heads,)
    _attend[grid](
        query, key, value, bias, kept, output, *statistics.unbind(),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *_get_steps(bias),
        *output.stride()[:3],
        batch, heads, queries, key.shape[2], get_groups(key.shape[2]) * 64, scale, kept_scale,
        drops=kept is not None, is_causal=is_causal, size=size, block_q=block_q, block_k=block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


FORWARD = {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (128, 64, 4, 3), 128: (128, 64, 8, 3)}
"""Head size -> queries and keys of a tile, warps, stages."""


def _get_steps(bias: Tensor) -> list[int]:
    """The strides of a bias, which may be the same for all rows or heads."""
    return [
        0 if length == 1 else step
        for length, step in zip(bias.shape[:3], bias.stride()[:3], strict=True)
    ]


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, bias, kept, output, shifts, inverses,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    value_batch, value_head, value_row, bias_batch, bias_head, bias_row,
    output_batch, output_head, output_row,
    batch, heads, queries, keys, kept_row, scale, kept_scale,
    drops: tl.constexpr, is_causal: tl.constexpr,
    size: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time share keys and values (tiles of a row) and bias (rows).
    program = tl.program_id(0)
    tiles = tl.cdiv(queries, block_q)
    row = ((program // tiles) % batch).to(tl.int64)
    head = (program // tiles // batch).to(tl.int64)
    place = row * heads + head
    first = (program % tiles) * block_q
    rows = first + tl.arange(0, block_q)
    columns = tl.arange(0, block_k)
    sizes = tl.arange(0, size)
    is_row = rows < queries
    if drops:
        kept += place * queries * kept_row
    query += row * query_batch + head * query_head
    key += row * key_batch + head * key_head
    value += row * value_batch + head * value_head
    bias += row * bias_batch + head * bias_head
    asking = tl.load(
        query + (rows[:, None] * query_row + sizes[None, :]), mask=is_row[:, None], other=0.0
    )
    largest = tl.full((block_q,), float("-inf"), tl.float32)
    total = tl.zeros((block_q,), tl.float32)
    sums = tl.zeros((block_q, size), tl.float32)
    end = keys
    if is_causal:
        end = tl.minimum(keys, first + block_q)
    for start in range(0, end, block_k):
        places = start + columns
        is_key = places < keys
        asked = tl.load(
            key + (places[None, :] * key_row + sizes[:, None]), mask=is_key[None, :], other=0.0
        )
        added = tl.load(
            bias + (rows[:, None] * bias_row + places[None, :]),
            mask=is_row[:, None] & is_key[None, :], other=float("-inf"),
        )  # fmt: skip
        scores = tl.dot(asking, asked) * scale + added.to(tl.float32)
        if is_causal:
            scores = tl.where(places[None, :] <= rows[:, None], scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2((scores - shift[:, None]) * _LOG2_E)
        fading = tl.exp2((largest - shift) * _LOG2_E)
        total = total * fading + tl.sum(weights, 1)
        largest = above
        if drops:
            bytes = (places // (_TILE * _BITS) * _TILE + places % _TILE)[None, :]
            bits = tl.load(kept + (rows[:, None] * kept_row + bytes), mask=is_row[:, None], other=0)
            is_kept = (bits.to(tl.int32) >> ((places // _TILE) % _BITS)[None, :]) & 1
            weights = tl.where(is_kept != 0, weights, 0.0)
        given = tl.load(
            value + (places[:, None] * value_row + sizes[None, :]), mask=is_key[:, None], other=0.0
        )
        sums = tl.dot(weights.to(given.dtype), given, sums * fading[:, None])
    inverse = tl.where(total > 0, 1 / total, 0.0)
    sums *= (inverse * kept_scale)[:, None]
    output += row * output_batch + head * output_head
    tl.store(
        output + (rows[:, None] * output_row + sizes[None, :]),
        sums.to(output.dtype.element_ty), mask=is_row[:, None],
    )  # fmt: skip
    shifts += place * queries
    inverses += place * queries
    tl.store(shifts + rows, tl.where(largest == float("-inf"), 0.0, largest), mask=is_row)
    tl.store(inverses + rows, inverse, mask=is_row)


# ---- backward ------------------------------------------------------------------------------------


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    kept: Tensor | None,
    output: Tensor,
    statistics: Tensor,
    found: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    kept_scale: float,
    *,
    is_causal: bool,
) -> None:
    """Fill the gradients of query, key, value and scores (contiguous) in ``found``."""
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    of_query, of_key, of_value, of_scores = found
    means = torch.empty_like(statistics[0])
    block_q, block_k, warps, stages = BACKWARD[size]
    _multiply_rows[(triton.cdiv(queries, block_q) * batch * heads,)](
        gradient, output, means, *gradient.stride()[:3], *output.stride()[:3],
        batch, heads, queries, size=size, block=block_q, num_warps=4,
    )  # fmt: skip
    _attend_backward[(triton.cdiv(keys, block_k) * batch * heads,)](
        gradient, query, key, value, bias, kept, *statistics.unbind(), means,
        of_key, of_value, of_scores,
        *gradient.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *_get_steps(bias), *of_key.stride()[:3], *of_value.stride()[:3],
        batch, heads, queries, keys, get_groups(keys) * 64, scale, kept_scale,
        drops=kept is not None, is_causal=is_causal, size=size, block_q=block_q, block_k=block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    block_q, block_k, warps, stages = PRODUCT[size]
    _multiply_scores[(triton.cdiv(queries, block_q) * batch * heads,)](
        of_scores, key, of_query, *key.stride()[:3], *of_query.stride()[:3],
        batch, heads, queries, keys, scale, is_causal=is_causal, size=size, block_q=block_q,
        block_k=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip


BACKWARD = {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (64, 128, 8, 2), 128: (64, 128, 8, 2)}
PRODUCT = {16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 64, 4, 3), 128: (128, 64, 8, 3)}


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_rows(  # type: ignore[no-untyped-def]
    gradient, output, means, gradient_batch, gradient_head, gradient_row,
    output_batch, output_head, output_row, batch, heads, queries,
    size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    # The weighted mean of a row's gradients of weights, which the softmax subtracts.
    program = tl.program_id(0)
    tiles = tl.cdiv(queries, block)
    row = ((program // tiles) % batch).to(tl.int64)
    head = (program // tiles // batch).to(tl.int64)
    rows = (program % tiles) * block + tl.arange(0, block)
    sizes = tl.arange(0, size)
    is_row = rows < queries
    gradient += row * gradient_batch + head * gradient_head + sizes[None, :]
    output += row * output_batch + head * output_head + sizes[None, :]
    first = tl.load(gradient + rows[:, None] * gradient_row, mask=is_row[:, None], other=0.0)
    second = tl.load(output + rows[:, None] * output_row, mask=is_row[:, None], other=0.0)
    products = tl.sum(first.to(tl.float32) * second.to(tl.float32), 1)
    tl.store(means + (row * heads + head) * queries + rows, products, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_backward(  # type: ignore[no-untyped-def]
    gradient, query, key, value, bias, kept, shifts, inverses, means,
    of_key, of_value, of_scores,
    gradient_batch, gradient_head, gradient_row, query_batch, query_head, query_row,
    key_batch, key_head, key_row, value_batch, value_head, value_row,
    bias_batch, bias_head, bias_row, of_key_batch, of_key_head, of_key_row,
    of_value_batch, of_value_head, of_value_row,
    batch, heads, queries, keys, kept_row, scale, kept_scale,
    drops: tl.constexpr, is_causal: tl.constexpr,
    size: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    # Tiles are [keys, queries]: weights and gradients go from one product to the next unturned.
    program = tl.program_id(0)
    tiles = tl.cdiv(keys, block_k)
    row = ((program // tiles) % batch).to(tl.int64)
    head = (program // tiles // batch).to(tl.int64)
    first = (row * heads + head) * queries
    places = (program % tiles) * block_k + tl.arange(0, block_k)
    bytes = places // (_TILE * _BITS) * _TILE + places % _TILE
    sizes = tl.arange(0, size)
    is_key = places < keys
    query += row * query_batch + head * query_head
    gradient += row * gradient_batch + head * gradient_head
    bias += row * bias_batch + head * bias_head
    of_scores += first * keys
    shifts += first
    inverses += first
    means += first
    if drops:
        kept += first * kept_row
    key += row * key_batch + head * key_head
    value += row * value_batch + head * value_head
    asked = tl.load(
        key + (places[:, None] * key_row + sizes[None, :]), mask=is_key[:, None], other=0.0
    )
    given = tl.load(
        value + (places[:, None] * value_row + sizes[None, :]), mask=is_key[:, None], other=0.0
    )
    key_sums = tl.zeros((block_k, size), tl.float32)
    value_sums = tl.zeros((block_k, size), tl.float32)
    begin = 0
    if is_causal:
        begin = (program % tiles) * block_k // block_q * block_q
    for start in range(begin, queries, block_q):
        rows = start + tl.arange(0, block_q)
        is_row = rows < queries
        is_pair = is_key[:, None] & is_row[None, :]
        asking = tl.load(
            query + (rows[:, None] * query_row + sizes[None, :]), mask=is_row[:, None], other=0.0
        )
        added = tl.load(
            bias + (rows[None, :] * bias_row + places[:, None]), mask=is_pair, other=float("-inf")
        )
        shift = tl.load(shifts + rows, mask=is_row, other=0.0)
        inverse = tl.load(inverses + rows, mask=is_row, other=0.0)
        mean = tl.load(means + rows, mask=is_row, other=0.0)
        scores = tl.dot(asked, tl.trans(asking)) * scale + added.to(tl.float32)
        if is_causal:
            scores = tl.where(places[:, None] <= rows[None, :], scores, float("-inf"))
        weights = tl.exp2((scores - shift[None, :]) * _LOG2_E) * inverse[None, :]
        given_back = tl.load(
            gradient + (rows[:, None] * gradient_row + sizes[None, :]),
            mask=is_row[:, None], other=0.0,
        )  # fmt: skip
        of_weights = tl.dot(given, tl.trans(given_back))
        used = weights
        if drops:
            bits = tl.load(
                kept + (rows[None, :] * kept_row + bytes[:, None]), mask=is_row[None, :], other=0
            )
            is_kept = (bits.to(tl.int32) >> ((places // _TILE) % _BITS)[:, None]) & 1
            factor = tl.where(is_kept != 0, kept_scale, 0.0)
            used = weights * factor
            of_weights *= factor
        value_sums = tl.dot(used.to(given_back.dtype), given_back, value_sums)
        slopes = (weights * (of_weights - mean[None, :])).to(asking.dtype)
        tl.store(of_scores + (rows[None, :] * keys + places[:, None]), slopes, mask=is_pair)
        key_sums = tl.dot(slopes, asking, key_sums)
    of_key += row * of_key_batch + head * of_key_head + sizes[None, :]
    of_value += row * of_value_batch + head * of_value_head + sizes[None, :]
    tl.store(
        of_key + places[:, None] * of_key_row,
        (key_sums * scale).to(of_key.dtype.element_ty), mask=is_key[:, None],
    )  # fmt: skip
    tl.store(
        of_value + places[:, None] * of_value_row,
        value_sums.to(of_value.dtype.element_ty), mask=is_key[:, None],
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_scores(  # type: ignore[no-untyped-def]
    of_scores, key, of_query, key_batch, key_head, key_row,
    of_query_batch, of_query_head, of_query_row, batch, heads, queries, keys, scale,
    is_causal: tl.constexpr, size: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles = tl.cdiv(queries, block_q)
    row = ((program // tiles) % batch).to(tl.int64)
    head = (program // tiles // batch).to(tl.int64)
    first = (program % tiles) * block_q
    rows = first + tl.arange(0, block_q)
    columns = tl.arange(0, block_k)
    sizes = tl.arange(0, size)
    is_row = rows < queries
    of_scores += (row * heads + head) * queries * keys
    key += row * key_batch + head * key_head
    sums = tl.zeros((block_q, size), tl.float32)
    end = keys
    if is_causal:
        end = tl.minimum(keys, first + block_q)
    for start in range(0, end, block_k):
        places = start + columns
        is_key = places < keys
        slopes = tl.load(
            of_scores + (rows[:, None] * keys + places[None, :]),
            mask=is_row[:, None] & is_key[None, :], other=0.0,
        )  # fmt: skip
        asked = tl.load(
            key + (places[:, None] * key_row + sizes[None, :]), mask=is_key[:, None], other=0.0
        )
        sums = tl.dot(slopes, asked, sums)
    of_query += row * of_query_batch + head * of_query_head + sizes[None, :]
    tl.store(
        of_query + rows[:, None] * of_query_row,
        (sums * scale).to(of_query.dtype.element_ty), mask=is_row[:, None],
    )  # fmt: skip
