"""Attention with a bias on the scores, backward, in Triton.

The gradient of the scores is written once, in 16 bits: the gradients of the queries and of the bias
are both sums over it. There are no atomic additions, so two runs give the same bits.

Import this module only if Triton is installed; torch's CPU builds come without it.
"""

# ruff: noqa: ANN001, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from rapidformer.accel.learned_bias.dropout import get_bit, get_byte, get_row_bytes
from rapidformer.accel.learned_bias.forward import LOG2_E, get_steps

TILES = {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (32, 128, 8, 3), 128: (32, 128, 8, 3)}
"""Head size -> queries and keys of a tile, warps, stages; 128 was timed, on an H200."""
PRODUCT_TILES = {
    16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 64, 4, 3), 128: (128, 64, 8, 3),
}  # fmt: skip
"""The same for the gradient of the queries."""


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    seen: Tensor | None,
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
    block_q, block_k, warps, stages = TILES[size]
    _multiply_rows[(triton.cdiv(queries, block_q) * batch * heads,)](
        gradient, output, means, *gradient.stride()[:3], *output.stride()[:3],
        batch, heads, queries, size=size, block=block_q, num_warps=4,
    )  # fmt: skip
    _attend_backward[(triton.cdiv(keys, block_k) * batch * heads,)](
        gradient, query, key, value, bias, seen, kept, *statistics.unbind(), means,
        of_key, of_value, of_scores,
        *gradient.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *get_steps(bias), *get_steps(seen), *of_key.stride()[:3], *of_value.stride()[:3],
        batch, heads, queries, keys, get_row_bytes(keys), scale, kept_scale,
        torch.finfo(query.dtype).min,
        hides=seen is not None, drops=kept is not None, is_causal=is_causal,
        read_q=PRODUCT_TILES[size][0], size=size, block_q=block_q, block_k=block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    block_q, block_k, warps, stages = PRODUCT_TILES[size]
    _multiply_scores[(triton.cdiv(queries, block_q) * batch * heads,)](
        of_scores, key, of_query, *key.stride()[:3], *of_query.stride()[:3],
        batch, heads, queries, keys, scale, is_causal=is_causal, size=size, block_q=block_q,
        block_k=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_rows(  # type: ignore[no-untyped-def]
    gradient, output, means, gradient_batch, gradient_head, gradient_row,
    output_batch, output_head, output_row, batch, heads, queries,
    size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    # The mean gradient of a row's weights, which the gradient of a softmax subtracts.
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
    gradient, query, key, value, bias, seen, kept, shifts, inverses, means,
    of_key, of_value, of_scores,
    gradient_batch, gradient_head, gradient_row, query_batch, query_head, query_row,
    key_batch, key_head, key_row, value_batch, value_head, value_row,
    bias_batch, bias_head, bias_row, seen_batch, seen_head, seen_row,
    of_key_batch, of_key_head, of_key_row, of_value_batch, of_value_head, of_value_row,
    batch, heads, queries, keys, kept_row, scale, kept_scale, lowest,
    hides: tl.constexpr, drops: tl.constexpr, is_causal: tl.constexpr, read_q: tl.constexpr,
    size: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    # Tiles are [keys, queries], so that weights and gradients go from one product into the next
    # without a transpose.
    program = tl.program_id(0)
    tiles = tl.cdiv(keys, block_k)
    row = ((program // tiles) % batch).to(tl.int64)
    head = (program // tiles // batch).to(tl.int64)
    first = (row * heads + head) * queries
    places = (program % tiles) * block_k + tl.arange(0, block_k)
    sizes = tl.arange(0, size)
    is_key = places < keys
    query += row * query_batch + head * query_head
    gradient += row * gradient_batch + head * gradient_head
    bias += row * bias_batch + head * bias_head
    if hides:
        seen += row * seen_batch + head * seen_head
    of_scores += first * keys
    shifts += first
    inverses += first
    means += first
    if drops:
        kept += first * kept_row
    key += row * key_batch + head * key_head
    value += row * value_batch + head * value_head
    k_tile = tl.load(
        key + (places[:, None] * key_row + sizes[None, :]), mask=is_key[:, None], other=0.0
    )
    v_tile = tl.load(
        value + (places[:, None] * value_row + sizes[None, :]), mask=is_key[:, None], other=0.0
    )
    key_sums = tl.zeros((block_k, size), tl.float32)
    value_sums = tl.zeros((block_k, size), tl.float32)
    # Queries before the first key do not see the tile; begin where _multiply_scores reads it.
    begin = 0
    if is_causal:
        begin = (program % tiles) * block_k // read_q * read_q
    for start in range(begin, queries, block_q):
        rows = start + tl.arange(0, block_q)
        is_row = rows < queries
        is_pair = is_key[:, None] & is_row[None, :]
        q_tile = tl.load(
            query + (rows[:, None] * query_row + sizes[None, :]), mask=is_row[:, None], other=0.0
        )
        bias_tile = tl.load(
            bias + (rows[None, :] * bias_row + places[:, None]), mask=is_pair, other=float("-inf")
        ).to(tl.float32)
        if hides:
            seen_tile = tl.load(
                seen + (rows[None, :] * seen_row + places[:, None]), mask=is_pair, other=1
            )
            bias_tile = tl.where(seen_tile != 0, bias_tile, lowest)
        shift = tl.load(shifts + rows, mask=is_row, other=0.0)
        inverse = tl.load(inverses + rows, mask=is_row, other=0.0)
        mean = tl.load(means + rows, mask=is_row, other=0.0)
        scores = tl.dot(k_tile, tl.trans(q_tile)) * scale + bias_tile
        if is_causal:
            scores = tl.where(places[:, None] <= rows[None, :], scores, float("-inf"))
        weights = tl.exp2((scores - shift[None, :]) * LOG2_E) * inverse[None, :]
        gradient_tile = tl.load(
            gradient + (rows[:, None] * gradient_row + sizes[None, :]),
            mask=is_row[:, None], other=0.0,
        )  # fmt: skip
        of_weights = tl.dot(v_tile, tl.trans(gradient_tile))
        used = weights
        if drops:
            kept_tile = tl.load(
                kept + (rows[None, :] * kept_row + get_byte(places)[:, None]),
                mask=is_row[None, :], other=0,
            )  # fmt: skip
            is_kept = (kept_tile.to(tl.int32) >> get_bit(places)[:, None]) & 1
            factor = tl.where(is_kept != 0, kept_scale, 0.0)
            used = weights * factor
            of_weights *= factor
        value_sums = tl.dot(used.to(gradient_tile.dtype), gradient_tile, value_sums)
        score_gradient = (weights * (of_weights - mean[None, :])).to(q_tile.dtype)
        tl.store(of_scores + (rows[None, :] * keys + places[:, None]), score_gradient, mask=is_pair)
        key_sums = tl.dot(score_gradient, q_tile, key_sums)
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
    # The gradient of the queries: that of the scores times the keys.
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
        score_gradient = tl.load(
            of_scores + (rows[:, None] * keys + places[None, :]),
            mask=is_row[:, None] & is_key[None, :], other=0.0,
        )  # fmt: skip
        k_tile = tl.load(
            key + (places[:, None] * key_row + sizes[None, :]), mask=is_key[:, None], other=0.0
        )
        sums = tl.dot(score_gradient, k_tile, sums)
    of_query += row * of_query_batch + head * of_query_head + sizes[None, :]
    tl.store(
        of_query + rows[:, None] * of_query_row,
        (sums * scale).to(of_query.dtype.element_ty), mask=is_row[:, None],
    )  # fmt: skip


def sum_score_gradients(
    of_scores: Tensor, seen: Tensor | None, of_bias: Tensor, *, is_causal: bool
) -> None:
    """Fill the gradient of the bias: the sum over the rows and heads that share it.

    Hidden keys contribute nothing, not even in a row without a visible key. Under ``is_causal``,
    what is right of the diagonal was never written.
    """
    batch, heads, queries, keys = of_scores.shape
    block_q, block_k = 16, 128
    tiles = triton.cdiv(queries, block_q) * triton.cdiv(keys, block_k)
    _sum_score_gradients[(tiles * of_bias.shape[0] * of_bias.shape[1],)](
        of_scores, seen, of_bias, *get_steps(seen), of_bias.shape[1],
        batch // of_bias.shape[0], heads // of_bias.shape[1], heads, queries, keys,
        hides=seen is not None, is_causal=is_causal, block_q=block_q, block_k=block_k, num_warps=4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _sum_score_gradients(  # type: ignore[no-untyped-def]
    of_scores, seen, of_bias, seen_batch, seen_head, seen_row, bias_heads,
    shared_rows, shared_heads, heads, queries, keys,
    hides: tl.constexpr, is_causal: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    across, down = tl.cdiv(keys, block_k), tl.cdiv(queries, block_q)
    rows = (program // across % down) * block_q + tl.arange(0, block_q)
    places = (program % across) * block_k + tl.arange(0, block_k)
    plane = (program // across // down).to(tl.int64)
    is_pair = (rows < queries)[:, None] & (places < keys)[None, :]
    pairs = rows[:, None] * keys + places[None, :]
    total = tl.zeros((block_q, block_k), tl.float32)
    for index in range(0, shared_rows * shared_heads):
        row = plane // bias_heads + index // shared_heads
        head = plane % bias_heads + index % shared_heads
        of_plane = of_scores + (row * heads + head) * queries * keys
        score_gradient = tl.load(of_plane + pairs, mask=is_pair, other=0.0).to(tl.float32)
        if hides:
            seen_tile = tl.load(
                seen + row * seen_batch + head * seen_head
                + (rows[:, None] * seen_row + places[None, :]), mask=is_pair, other=0,
            )  # fmt: skip
            score_gradient = tl.where(seen_tile != 0, score_gradient, 0.0)
        total += score_gradient
    if is_causal:
        total = tl.where(places[None, :] <= rows[:, None], total, 0.0)
    of_bias += plane * queries * keys
    tl.store(of_bias + pairs, total.to(of_bias.dtype.element_ty), mask=is_pair)
