"""Attention with a bias on the scores, backward, in Triton.

The gradient of the scores is written once, in 16 bits, and the gradients of queries and bias are
both computed from it. There are no atomic additions, so two runs give the same bits.

Import this module only if Triton is installed; torch's CPU builds come without it.
"""

# ruff: noqa: ANN001, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from rapidformer.accel.learned_bias.call import Call, allocate_gradients
from rapidformer.accel.learned_bias.dropout import get_bit, get_byte
from rapidformer.accel.learned_bias.forward import LOG2_E
from rapidformer.accel.learned_bias.launch import (
    Arguments,
    Tile,
    find_head,
    find_tile,
    get_arguments,
    get_strided,
    launch,
)

_TILES = {
    16: Tile(queries=64, keys=64, warps=4, stages=2),
    32: Tile(queries=64, keys=64, warps=4, stages=2),
    64: Tile(queries=32, keys=128, warps=8, stages=3),
    128: Tile(queries=32, keys=128, warps=8, stages=3),
}
"""By head size; 128 was timed, on an H200."""
_PRODUCT_TILES = {
    16: Tile(queries=128, keys=64, warps=4, stages=3),
    32: Tile(queries=128, keys=64, warps=4, stages=3),
    64: Tile(queries=128, keys=64, warps=4, stages=3),
    128: Tile(queries=128, keys=64, warps=8, stages=3),
}
"""By head size, for the gradient of the queries."""


def attend_backward(
    call: Call, gradient: Tensor, output: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and bias; ``gradient`` is that of the output."""
    queries, size = call.query.shape[2:]
    found = allocate_gradients(call.query, call.key, call.value, call.bias)
    of_query, of_key, of_value, of_bias = found
    of_scores = call.query.new_empty((*call.query.shape[:3], call.keys))
    means = torch.empty_like(statistics[0])
    arguments, given = get_arguments(call), get_strided(gradient)
    tile, product_tile = _TILES[size], _PRODUCT_TILES[size]
    launch(
        _multiply_rows, queries, tile.queries, call,
        given, get_strided(output), means, arguments.lengths, block=tile.queries, num_warps=4,
    )  # fmt: skip
    launch(
        _attend_backward, call.keys, tile.keys, call,
        arguments, given, *statistics.unbind(), means,
        get_strided(of_key), get_strided(of_value), get_strided(of_scores),
        is_causal=call.is_causal, read_q=product_tile.queries, block_q=tile.queries,
        block_k=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    launch(
        _multiply_scores, queries, product_tile.queries, call,
        get_strided(of_scores), arguments.key, get_strided(of_query), arguments.lengths, call.scale,
        is_causal=call.is_causal, block_q=product_tile.queries, block_k=product_tile.keys,
        num_warps=product_tile.warps, num_stages=product_tile.stages,
    )  # fmt: skip
    _sum_score_gradients(arguments, of_scores, of_bias, is_causal=call.is_causal)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_rows(  # type: ignore[no-untyped-def]
    gradient, output, means, lengths, size: tl.constexpr, block: tl.constexpr
):
    # The mean gradient of a row's weights, which the gradient of a softmax subtracts.
    start, row, head = find_tile(lengths.queries, lengths.batch, block)
    rows = start + tl.arange(0, block)
    columns = tl.arange(0, size)
    is_row = rows < lengths.queries
    first = tl.load(
        find_head(gradient, row, head) + columns[None, :] + rows[:, None] * gradient.row,
        mask=is_row[:, None], other=0.0,
    )  # fmt: skip
    second = tl.load(
        find_head(output, row, head) + columns[None, :] + rows[:, None] * output.row,
        mask=is_row[:, None], other=0.0,
    )  # fmt: skip
    products = tl.sum(first.to(tl.float32) * second.to(tl.float32), 1)
    place = (row * lengths.heads + head) * lengths.queries
    tl.store(means + place + rows, products, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_backward(  # type: ignore[no-untyped-def]
    call, output_gradient, shifts, inverses, means, of_key, of_value, of_scores,
    is_causal: tl.constexpr, read_q: tl.constexpr, size: tl.constexpr, block_q: tl.constexpr,
    block_k: tl.constexpr,
):  # fmt: skip
    # Tiles are [keys, queries], so that weights and gradients go from one product into the next
    # without a transpose.
    queries, keys = call.lengths.queries, call.lengths.keys
    first_key, row, head = find_tile(keys, call.lengths.batch, block_k)
    places = first_key + tl.arange(0, block_k)
    sizes = tl.arange(0, size)
    is_key = places < keys
    query = find_head(call.query, row, head)
    key = find_head(call.key, row, head)
    value = find_head(call.value, row, head)
    bias = find_head(call.bias, row, head)
    if call.seen is not None:
        seen = find_head(call.seen, row, head)
    if call.kept is not None:
        kept = find_head(call.kept, row, head)
    gradient = find_head(output_gradient, row, head)
    score_gradients = find_head(of_scores, row, head)
    first = (row * call.lengths.heads + head) * queries
    shifts += first
    inverses += first
    means += first
    k_tile = tl.load(
        key + (places[:, None] * call.key.row + sizes[None, :]), mask=is_key[:, None], other=0.0
    )
    v_tile = tl.load(
        value + (places[:, None] * call.value.row + sizes[None, :]), mask=is_key[:, None], other=0.0
    )
    key_sums = tl.zeros((block_k, size), tl.float32)
    value_sums = tl.zeros((block_k, size), tl.float32)
    # Queries before the first key do not see the tile; begin where _multiply_scores reads it.
    begin = 0
    if is_causal:
        begin = first_key // read_q * read_q
    for start in range(begin, queries, block_q):
        rows = start + tl.arange(0, block_q)
        is_row = rows < queries
        is_pair = is_key[:, None] & is_row[None, :]
        q_tile = tl.load(
            query + (rows[:, None] * call.query.row + sizes[None, :]),
            mask=is_row[:, None],
            other=0.0,
        )
        bias_tile = tl.load(
            bias + (rows[None, :] * call.bias.row + places[:, None]),
            mask=is_pair,
            other=float("-inf"),
        ).to(tl.float32)
        if call.seen is not None:
            seen_tile = tl.load(
                seen + (rows[None, :] * call.seen.row + places[:, None]), mask=is_pair, other=1
            )
            bias_tile = tl.where(seen_tile != 0, bias_tile, call.lowest)
        shift = tl.load(shifts + rows, mask=is_row, other=0.0)
        inverse = tl.load(inverses + rows, mask=is_row, other=0.0)
        mean = tl.load(means + rows, mask=is_row, other=0.0)
        scores = tl.dot(k_tile, tl.trans(q_tile)) * call.scale + bias_tile
        if is_causal:
            scores = tl.where(places[:, None] <= rows[None, :], scores, float("-inf"))
        weights = tl.exp2((scores - shift[None, :]) * LOG2_E) * inverse[None, :]
        gradient_tile = tl.load(
            gradient + (rows[:, None] * output_gradient.row + sizes[None, :]),
            mask=is_row[:, None], other=0.0,
        )  # fmt: skip
        of_weights = tl.dot(v_tile, tl.trans(gradient_tile))
        used = weights
        if call.kept is not None:
            kept_tile = tl.load(
                kept + (rows[None, :] * call.kept.row + get_byte(places)[:, None]),
                mask=is_row[None, :], other=0,
            )  # fmt: skip
            is_kept = (kept_tile.to(tl.int32) >> get_bit(places)[:, None]) & 1
            factor = tl.where(is_kept != 0, call.kept_scale, 0.0)
            used = weights * factor
            of_weights *= factor
        value_sums = tl.dot(used.to(gradient_tile.dtype), gradient_tile, value_sums)
        score_gradient = (weights * (of_weights - mean[None, :])).to(q_tile.dtype)
        tl.store(
            score_gradients + (rows[None, :] * of_scores.row + places[:, None]),
            score_gradient, mask=is_pair,
        )  # fmt: skip
        key_sums = tl.dot(score_gradient, q_tile, key_sums)
    tl.store(
        find_head(of_key, row, head) + sizes[None, :] + places[:, None] * of_key.row,
        (key_sums * call.scale).to(of_key.start.dtype.element_ty), mask=is_key[:, None],
    )  # fmt: skip
    tl.store(
        find_head(of_value, row, head) + sizes[None, :] + places[:, None] * of_value.row,
        value_sums.to(of_value.start.dtype.element_ty), mask=is_key[:, None],
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_scores(  # type: ignore[no-untyped-def]
    of_scores, key, of_query, lengths, scale,
    is_causal: tl.constexpr, size: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    # The gradient of the queries: that of the scores times the keys.
    first, row, head = find_tile(lengths.queries, lengths.batch, block_q)
    rows = first + tl.arange(0, block_q)
    columns = tl.arange(0, block_k)
    sizes = tl.arange(0, size)
    is_row = rows < lengths.queries
    score_gradients = find_head(of_scores, row, head)
    keys = find_head(key, row, head)
    sums = tl.zeros((block_q, size), tl.float32)
    end = lengths.keys
    if is_causal:
        end = tl.minimum(lengths.keys, first + block_q)
    for start in range(0, end, block_k):
        places = start + columns
        is_key = places < lengths.keys
        score_gradient = tl.load(
            score_gradients + (rows[:, None] * of_scores.row + places[None, :]),
            mask=is_row[:, None] & is_key[None, :], other=0.0,
        )  # fmt: skip
        k_tile = tl.load(
            keys + (places[:, None] * key.row + sizes[None, :]), mask=is_key[:, None], other=0.0
        )
        sums = tl.dot(score_gradient, k_tile, sums)
    tl.store(
        find_head(of_query, row, head) + sizes[None, :] + rows[:, None] * of_query.row,
        (sums * scale).to(of_query.start.dtype.element_ty), mask=is_row[:, None],
    )  # fmt: skip


def _sum_score_gradients(
    call: Arguments, of_scores: Tensor, of_bias: Tensor, *, is_causal: bool
) -> None:
    """Fill the gradient of the bias: the sum over the rows and heads that share it.

    Hidden keys contribute nothing, even in a row where all keys are hidden. Under ``is_causal``,
    scores right of the diagonal were never written, and count as 0.
    """
    lengths, block_q, block_k = call.lengths, 16, 128
    rows, heads = of_bias.shape[:2]
    tiles = triton.cdiv(lengths.queries, block_q) * triton.cdiv(lengths.keys, block_k)
    _add_up[(tiles * rows * heads,)](
        get_strided(of_scores), call.seen, of_bias, lengths, heads,
        lengths.batch // rows, lengths.heads // heads,
        is_causal=is_causal, block_q=block_q, block_k=block_k, num_warps=4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    of_scores, seen, of_bias, lengths, bias_heads, shared_rows, shared_heads,
    is_causal: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    queries, keys = lengths.queries, lengths.keys
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
        of_plane = find_head(of_scores, row, head)
        score_gradient = tl.load(of_plane + pairs, mask=is_pair, other=0.0).to(tl.float32)
        if seen is not None:
            seen_tile = tl.load(
                find_head(seen, row, head) + (rows[:, None] * seen.row + places[None, :]),
                mask=is_pair, other=0,
            )  # fmt: skip
            score_gradient = tl.where(seen_tile != 0, score_gradient, 0.0)
        total += score_gradient
    if is_causal:
        total = tl.where(places[None, :] <= rows[:, None], total, 0.0)
    of_bias += plane * queries * keys
    tl.store(of_bias + pairs, total.to(of_bias.dtype.element_ty), mask=is_pair)
