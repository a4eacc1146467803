"""The losses of a chunk of logits and their gradient in one Triton kernel.

Eager torch reads and writes a chunk's logits about ten times; here each row is read twice, the
second time from the cache, and the gradient is written once, over the logits. Import this module
only if Triton is installed; torch's CPU builds come without it.
"""

# ruff: noqa: ANN001, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from rapidformer.compat.triton import on_device
from rapidformer.dist.vocabulary import Scored

_LOG2_E = tl.constexpr(1.4426950408889634)
_LANES = 1024
_COUNT = 8
"""Columns of a block that one lane, which is one thread, reduces on its own."""


def score_in_place(
    logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float,
    *, has_gradient: bool = True, has_statistics: bool = False,
) -> Scored:  # fmt: skip
    """The rows' cross entropies, and the gradient of their sum, which replaces the logits.

    A label outside the vocabulary makes the loss NaN.
    """
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    statistics = losses.new_empty(3, rows) if has_statistics else None
    lanes = min(max(triton.next_power_of_2(width) // _COUNT, 128), _LANES)
    # If rows are aligned, a thread loads adjacent columns at once. Otherwise adjacent threads load
    # adjacent columns.
    axis = 1 if width % 16 == 0 and logits.stride(0) % 16 == 0 else 0
    with on_device(logits.device):
        _score_row[(rows,)](
            logits, logits.stride(0), labels, labels.stride(0), losses,
            losses if statistics is None else statistics, rows, width, ignore_index, smoothing,
            has_gradient=has_gradient, has_statistics=has_statistics,
            lanes=lanes, count=_COUNT, axis=axis, num_warps=lanes // 32,
        )  # fmt: skip
    return Scored(losses, logits if has_gradient else None, statistics)


@triton.jit  # type: ignore[untyped-decorator]
def _score_row(  # type: ignore[no-untyped-def]
    logits,
    step,
    labels,
    label_step,
    losses,
    statistics,
    rows,
    width,
    ignore_index,
    smoothing: tl.constexpr,
    has_gradient: tl.constexpr,
    has_statistics: tl.constexpr,
    lanes: tl.constexpr,
    count: tl.constexpr,
    axis: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row * label_step)
    logits += row * step
    block: tl.constexpr = lanes * count
    if axis == 1:  # the axis of a lane's columns
        columns = tl.arange(0, lanes)[:, None] * count + tl.arange(0, count)[None, :]
    else:
        columns = tl.arange(0, count)[:, None] * lanes + tl.arange(0, lanes)[None, :]
    if label == ignore_index:
        if has_gradient:
            for start in range(0, width, block):
                tl.store(logits + start + columns, 0.0, mask=start + columns < width)
        tl.store(losses + row, 0.0)
        if has_statistics:
            for number in tl.static_range(3):
                tl.store(statistics + number * rows + row, 0.0)
        return
    # Each lane keeps its own largest value and sum, so threads wait for each other once per row.
    largest = tl.full((lanes,), -1.0e38, tl.float32)
    exponentials = tl.zeros((lanes,), tl.float32)
    moments = tl.zeros((lanes,), tl.float32)
    total = tl.zeros((lanes,), tl.float32)
    # Full blocks need no mask; the rest of the row does.
    whole = width // block * block
    for start in range(0, whole, block):
        values = tl.load(logits + start + columns).to(tl.float32)
        largest, exponentials, moments = _add_exponentials(
            values, largest, exponentials, moments, axis, has_statistics
        )
        if smoothing > 0 or has_statistics:
            total += tl.sum(values, axis)
    is_word = whole + columns < width
    rest = tl.load(logits + whole + columns, mask=is_word, other=float("-inf")).to(tl.float32)
    largest, exponentials, moments = _add_exponentials(
        rest, largest, exponentials, moments, axis, has_statistics
    )
    above = tl.max(largest, 0)
    scales = tl.exp(largest - above)
    mass = tl.sum(exponentials * scales, 0)
    normalizer = above + tl.log(mass)
    is_known = (label >= 0) & (label < width)
    chosen = tl.load(logits + label, mask=is_known, other=float("nan")).to(tl.float32)
    loss = normalizer - (1 - smoothing) * chosen
    even = 0.0
    if smoothing > 0 or has_statistics:
        total += tl.sum(tl.where(is_word, rest, 0.0), axis)
    if smoothing > 0:
        even = smoothing / width
        loss -= even * tl.sum(total, 0)
    tl.store(losses + row, loss)
    if has_statistics:
        mean = tl.sum(moments * scales, 0) / mass  # of the logits, weighted by probability
        tl.store(statistics + row, normalizer - mean)
        tl.store(statistics + rows + row, tl.sum(total, 0) / width)
        tl.store(statistics + 2 * rows + row, tl.where(chosen >= above, 1.0, 0.0))
    if has_gradient:
        # All threads must have read the label's logit before one of them overwrites it.
        tl.debug_barrier()
        scaled = normalizer * _LOG2_E
        tl.store(logits + whole + columns, tl.exp2(rest * _LOG2_E - scaled) - even, mask=is_word)
        # Backwards: what was read last is still in the cache.
        for index in range(0, whole, block):
            places = logits + (whole - block - index) + columns
            values = tl.load(places).to(tl.float32)
            tl.store(places, tl.exp2(values * _LOG2_E - scaled) - even)
        tl.debug_barrier()
        gradient = tl.exp2(chosen * _LOG2_E - scaled) - even - (1 - smoothing)
        tl.store(logits + label, gradient, mask=is_known)


@triton.jit  # type: ignore[untyped-decorator]
def _add_exponentials(  # type: ignore[no-untyped-def]
    values, largest, exponentials, moments, axis: tl.constexpr, has_moments: tl.constexpr
):
    """Add a block's exponentials to each lane's sum, with the lane's largest value taken out; and,
    for the moments, their products with the values."""
    above = tl.maximum(largest, tl.max(values, axis))
    # exp2 takes one instruction less than exp: its multiplication and subtraction are fused.
    powers = tl.exp2(values * _LOG2_E - tl.expand_dims(above * _LOG2_E, axis))
    scale = tl.exp(largest - above)
    if has_moments:
        # A word that cannot be (-inf) adds nothing.
        products = tl.where(powers > 0, powers * values, 0.0)
        moments = moments * scale + tl.sum(products, axis)
    return above, exponentials * scale + tl.sum(powers, axis), moments
