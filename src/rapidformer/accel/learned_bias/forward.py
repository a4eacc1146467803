"""Attention with a bias on the scores, forward, in Triton.

The keys are visited in tiles, with a running softmax, so no [queries, keys] tensor is written.

Import this module only if Triton is installed; torch's CPU builds come without it.
"""

# ruff: noqa: ANN001, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from rapidformer.accel.learned_bias.dropout import get_bit, get_byte, get_row_bytes

LOG2_E = tl.constexpr(1.4426950408889634)
TILES = {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (64, 64, 4, 2), 128: (64, 64, 4, 2)}
"""Head size -> queries and keys of a tile, warps, stages; 128 was timed, on an H200."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    seen: Tensor | None,
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
    Merged into one logarithm, the sum would be lost if all keys of a row are masked: the largest
    score is then the lowest number of the bias's type.
    """
    batch, heads, queries, size = query.shape
    block_q, block_k, warps, stages = TILES[size]
    grid = (triton.cdiv(queries, block_q) * batch * heads,)
    _attend[grid](
        query, key, value, bias, seen, kept, output, *statistics.unbind(),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *get_steps(bias), *get_steps(seen), *output.stride()[:3],
        batch, heads, queries, key.shape[2], get_row_bytes(key.shape[2]), scale, kept_scale,
        torch.finfo(query.dtype).min,
        hides=seen is not None, drops=kept is not None, is_causal=is_causal,
        size=size, block_q=block_q, block_k=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def get_steps(tensor: Tensor | None) -> list[int]:
    """The strides of a bias or mask, which may be the same for all rows, heads or queries."""
    if tensor is None:
        return [0, 0, 0]
    sizes = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    return [0 if length == 1 else step for length, step in sizes]


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, bias, seen, kept, output, shifts, inverses,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    value_batch, value_head, value_row, bias_batch, bias_head, bias_row,
    seen_batch, seen_head, seen_row, output_batch, output_head, output_row,
    batch, heads, queries, keys, kept_row, scale, kept_scale, lowest,
    hides: tl.constexpr, drops: tl.constexpr, is_causal: tl.constexpr,
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
    if hides:
        seen += row * seen_batch + head * seen_head
    q_tile = tl.load(
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
        k_tile = tl.load(
            key + (places[None, :] * key_row + sizes[:, None]), mask=is_key[None, :], other=0.0
        )
        bias_tile = tl.load(
            bias + (rows[:, None] * bias_row + places[None, :]),
            mask=is_row[:, None] & is_key[None, :], other=float("-inf"),
        ).to(tl.float32)  # fmt: skip
        if hides:
            seen_tile = tl.load(
                seen + (rows[:, None] * seen_row + places[None, :]),
                mask=is_row[:, None] & is_key[None, :], other=1,
            )  # fmt: skip
            bias_tile = tl.where(seen_tile != 0, bias_tile, lowest)
        scores = tl.dot(q_tile, k_tile) * scale + bias_tile
        if is_causal:
            scores = tl.where(places[None, :] <= rows[:, None], scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2((scores - shift[:, None]) * LOG2_E)
        correction = tl.exp2((largest - shift) * LOG2_E)
        total = total * correction + tl.sum(weights, 1)
        largest = above
        if drops:
            kept_tile = tl.load(
                kept + (rows[:, None] * kept_row + get_byte(places)[None, :]),
                mask=is_row[:, None], other=0,
            )  # fmt: skip
            is_kept = (kept_tile.to(tl.int32) >> get_bit(places)[None, :]) & 1
            weights = tl.where(is_kept != 0, weights, 0.0)
        v_tile = tl.load(
            value + (places[:, None] * value_row + sizes[None, :]), mask=is_key[:, None], other=0.0
        )
        sums = tl.dot(weights.to(v_tile.dtype), v_tile, sums * correction[:, None])
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
