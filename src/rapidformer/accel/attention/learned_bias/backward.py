"""Attention with a bias on the scores, backward, in Triton: without atomics, so bits repeat."""

# ruff: noqa: ANN001, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from rapidformer.accel.attention.learned_bias.call import Call, allocate_like, round_up
from rapidformer.accel.attention.learned_bias.forward import LOG2_E
from rapidformer.accel.attention.learned_bias.launch import (
    LENGTHS,
    Strided,
    Tile,
    find_head,
    find_statistics,
    find_tile,
    get_arguments,
    get_strided,
    launch,
    load_bias,
    load_kept,
    pad_length,
)


def attend_backward(
    call: Call, gradient: Tensor, output: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and bias; ``gradient`` is that of the output."""
    queries, size = call.query.shape[2:]
    of_query, of_key, of_value = map(allocate_like, (call.query, call.key, call.value))
    of_scores = call.query.new_empty((*call.query.shape[:3], round_up(call.keys)))
    means = torch.empty_like(statistics[0])
    arguments, given = get_arguments(call), get_strided(gradient)
    # For heads of 128, they were timed on an H200.
    tile = Tile(64, 64, warps=4, stages=2) if size < 64 else Tile(32, 128, warps=8, stages=3)
    product_tile = Tile(128, 64, warps=4 if size < 128 else 8, stages=3)
    launch(
        _multiply_rows, queries, tile.queries, call,
        given, get_strided(output), means, block=tile.queries, num_warps=4,
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
        get_strided(of_scores), arguments.key, get_strided(of_query), call.scale,
        is_causal=call.is_causal, block_q=product_tile.queries, block_k=product_tile.keys,
        num_warps=product_tile.warps, num_stages=product_tile.stages,
    )  # fmt: skip
    return of_query, of_key, of_value, _sum_score_gradients(call, arguments.seen, of_scores)


@triton.jit(do_not_specialize=LENGTHS)  # type: ignore[untyped-decorator]
def _multiply_rows(  # type: ignore[no-untyped-def]
    gradient, output, means, batch, heads, queries, keys, size: tl.constexpr, block: tl.constexpr
):
    # The mean gradient of a row's weights, which the gradient of a softmax subtracts.
    start, row, head = find_tile(queries, batch, block)
    rows = start + tl.arange(0, block)
    columns = tl.arange(0, size)
    is_row = rows < queries
    first = tl.load(
        find_head(gradient, row, head) + columns[None, :] + rows[:, None] * gradient.row,
        mask=is_row[:, None], other=0.0,
    )  # fmt: skip
    second = tl.load(
        find_head(output, row, head) + columns[None, :] + rows[:, None] * output.row,
        mask=is_row[:, None], other=0.0,
    )  # fmt: skip
    products = tl.sum(first.to(tl.float32) * second.to(tl.float32), 1)
    places = find_statistics(row, head, heads, queries) + rows
    tl.store(means + places, products, mask=rows < pad_length(queries))


@triton.jit(do_not_specialize=LENGTHS)  # type: ignore[untyped-decorator]
def _attend_backward(  # type: ignore[no-untyped-def]
    call, output_gradient, shifts, inverses, means, of_key, of_value, of_scores,
    batch, heads, queries, keys,
    is_causal: tl.constexpr, read_q: tl.constexpr, size: tl.constexpr, block_q: tl.constexpr,
    block_k: tl.constexpr,
):  # fmt: skip
    # Tiles are [keys, queries], so that weights and gradients go from one product into the next
    # without a transpose.
    first_key, row, head = find_tile(keys, batch, block_k)
    places = first_key + tl.arange(0, block_k)
    sizes = tl.arange(0, size)
    is_key = places < keys
    query = find_head(call.query, row, head)
    key = find_head(call.key, row, head)
    value = find_head(call.value, row, head)
    gradient = find_head(output_gradient, row, head)
    score_gradients = find_head(of_scores, row, head)
    statistics = find_statistics(row, head, heads, queries)
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
        is_pair = (places < pad_length(keys))[:, None] & is_row[None, :]
        q_tile = tl.load(
            query + (rows[:, None] * call.query.row + sizes[None, :]),
            mask=is_row[:, None],
            other=0.0,
        )
        bias_tile = load_bias(call, row, head, rows[None, :], places[:, None], is_pair)
        has_memory = rows < pad_length(queries)
        shift = tl.load(shifts + statistics + rows, mask=has_memory, other=0.0)
        inverse = tl.load(inverses + statistics + rows, mask=has_memory, other=0.0)
        mean = tl.load(means + statistics + rows, mask=has_memory, other=0.0)
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
            is_kept = load_kept(call, row, head, rows[None, :], places[:, None], is_row[None, :])
            factor = tl.where(is_kept, call.kept_scale, 0.0)
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


@triton.jit(do_not_specialize=LENGTHS)  # type: ignore[untyped-decorator]
def _multiply_scores(  # type: ignore[no-untyped-def]
    of_scores, key, of_query, scale, batch, heads, queries, keys,
    is_causal: tl.constexpr, size: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    # The gradient of the queries: that of the scores times the keys.
    first, row, head = find_tile(queries, batch, block_q)
    rows = first + tl.arange(0, block_q)
    columns = tl.arange(0, block_k)
    sizes = tl.arange(0, size)
    is_row = rows < queries
    score_gradients = find_head(of_scores, row, head)
    key_start = find_head(key, row, head)
    sums = tl.zeros((block_q, size), tl.float32)
    end = keys
    if is_causal:
        end = tl.minimum(keys, first + block_q)
    for start in range(0, end, block_k):
        places = start + columns
        score_gradient = tl.load(
            score_gradients + (rows[:, None] * of_scores.row + places[None, :]),
            mask=is_row[:, None] & (places < pad_length(keys))[None, :], other=0.0,
        )  # fmt: skip
        k_tile = tl.load(
            key_start + (places[:, None] * key.row + sizes[None, :]),
            mask=(places < keys)[:, None], other=0.0,
        )  # fmt: skip
        sums = tl.dot(score_gradient, k_tile, sums)
    tl.store(
        find_head(of_query, row, head) + sizes[None, :] + rows[:, None] * of_query.row,
        (sums * scale).to(of_query.start.dtype.element_ty), mask=is_row[:, None],
    )  # fmt: skip


def _sum_score_gradients(call: Call, seen: Strided | None, of_scores: Tensor) -> Tensor:
    """The gradient of the bias: the sum over the rows and heads that share it, and visible keys."""
    batch, heads, queries, columns = of_scores.shape
    rows, bias_heads = call.bias.shape[:2]
    block_q, block_k = 16, 128
    of_bias = call.bias.new_empty((rows, bias_heads, queries, columns))
    tiles = triton.cdiv(queries, block_q) * triton.cdiv(columns, block_k)
    _add_up[(tiles * rows * bias_heads,)](
        get_strided(of_scores), seen, get_strided(of_bias), batch // rows, heads // bias_heads,
        bias_heads, queries, call.keys,
        is_causal=call.is_causal, block_q=block_q, block_k=block_k, num_warps=4,
    )  # fmt: skip
    return of_bias[..., : call.keys].contiguous()


@triton.jit(do_not_specialize=("shared_rows", "shared_heads", "heads", "queries", "keys"))  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    of_scores, seen, of_bias, shared_rows, shared_heads, heads, queries, keys,
    is_causal: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    # ``heads`` are those of the bias.
    program = tl.program_id(0)
    across, down = tl.cdiv(keys, block_k), tl.cdiv(queries, block_q)
    rows = (program // across % down) * block_q + tl.arange(0, block_q)
    places = (program % across) * block_k + tl.arange(0, block_k)
    plane = (program // across // down).to(tl.int64)
    is_pair = (rows < queries)[:, None] & (places < pad_length(keys))[None, :]
    pairs = rows[:, None] * of_scores.row + places[None, :]
    total = tl.zeros((block_q, block_k), tl.float32)
    for index in range(0, shared_rows * shared_heads):
        row = plane // heads + index // shared_heads
        head = plane % heads + index % shared_heads
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
    tl.store(
        find_head(of_bias, plane // heads, plane % heads) + pairs,
        total.to(of_bias.start.dtype.element_ty), mask=is_pair,
    )  # fmt: skip
