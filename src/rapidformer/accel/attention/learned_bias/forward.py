"""Attention with a bias on the scores, forward, in Triton: tiles of keys, a running softmax."""

# ruff: noqa: ANN001, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import triton
from torch import Tensor
from triton import language as tl

from rapidformer.accel.attention.learned_bias.call import Call, allocate_output
from rapidformer.accel.attention.learned_bias.launch import (
    LENGTHS,
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

LOG2_E = tl.constexpr(1.4426950408889634)
_TILE = Tile(queries=64, keys=64, warps=4, stages=2)
"""For all head sizes; 128 was timed, on an H200."""


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """The output, and statistics [2, batch, heads, queries] for the backward pass.

    The statistics are the largest score of each row and the reciprocal of its sum of exponentials.
    They are not merged into one logarithm: in a row whose keys are all masked, the largest score is
    the dtype's lowest number, and adding the sum's logarithm to it would lose the sum.
    """
    output, statistics = allocate_output(call.query)
    launch(
        _attend, call.query.shape[2], _TILE.queries, call,
        get_arguments(call), get_strided(output), *statistics.unbind(),
        is_causal=call.is_causal, block_q=_TILE.queries, block_k=_TILE.keys,
        num_warps=_TILE.warps, num_stages=_TILE.stages,
    )  # fmt: skip
    return output, statistics


@triton.jit(do_not_specialize=LENGTHS)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    call, output, shifts, inverses, batch, heads, queries, keys,
    is_causal: tl.constexpr, size: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    first, row, head = find_tile(queries, batch, block_q)
    rows = first + tl.arange(0, block_q)
    columns = tl.arange(0, block_k)
    sizes = tl.arange(0, size)
    is_row = rows < queries
    query = find_head(call.query, row, head)
    key = find_head(call.key, row, head)
    value = find_head(call.value, row, head)
    q_tile = tl.load(
        query + (rows[:, None] * call.query.row + sizes[None, :]), mask=is_row[:, None], other=0.0
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
        k_tile = tl.load(
            key + (places[None, :] * call.key.row + sizes[:, None]), mask=is_key[None, :], other=0.0
        )
        is_pair = is_row[:, None] & (places < pad_length(keys))[None, :]
        bias_tile = load_bias(call, row, head, rows[:, None], places[None, :], is_pair)
        scores = tl.dot(q_tile, k_tile) * call.scale + bias_tile
        if is_causal:
            scores = tl.where(places[None, :] <= rows[:, None], scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2((scores - shift[:, None]) * LOG2_E)
        correction = tl.exp2((largest - shift) * LOG2_E)
        total = total * correction + tl.sum(weights, 1)
        largest = above
        if call.kept is not None:
            is_kept = load_kept(call, row, head, rows[:, None], places[None, :], is_row[:, None])
            weights = tl.where(is_kept, weights, 0.0)
        v_tile = tl.load(
            value + (places[:, None] * call.value.row + sizes[None, :]),
            mask=is_key[:, None],
            other=0.0,
        )
        sums = tl.dot(weights.to(v_tile.dtype), v_tile, sums * correction[:, None])
    inverse = tl.where(total > 0, 1 / total, 0.0)
    sums *= (inverse * call.kept_scale)[:, None]
    tl.store(
        find_head(output, row, head) + (rows[:, None] * output.row + sizes[None, :]),
        sums.to(output.start.dtype.element_ty), mask=is_row[:, None],
    )  # fmt: skip
    places = find_statistics(row, head, heads, queries) + rows
    has_memory = rows < pad_length(queries)
    tl.store(shifts + places, tl.where(largest == float("-inf"), 0.0, largest), mask=has_memory)
    tl.store(inverses + places, inverse, mask=has_memory)
