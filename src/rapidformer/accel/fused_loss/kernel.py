"""The loss of a chunk of logits and its gradient in one Triton kernel.

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

_LOG2_E = tl.constexpr(1.4426950408889634)
_LANES = 1024
_COUNT = 8
"""Columns of a block that one lane, which is one thread, reduces on its own."""


def differentiate_in_place(
    logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The sum of the rows' cross entropies, and its gradient, which replaces the logits.

    A label outside the vocabulary makes the loss NaN.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    rows, width = logits.shape
    lanes = min(max(triton.next_power_of_2(width) // _COUNT, 128), _LANES)
    # If rows are aligned, a thread loads adjacent columns at once. Otherwise adjacent threads load
    # adjacent columns.
    axis = 1 if width % 16 == 0 and logits.stride(0) % 16 == 0 else 0
    with on_device(logits.device):
        _differentiate_row[(rows,)](
            logits, logits.stride(0), labels, labels.stride(0), losses, width, ignore_index,
            smoothing, lanes=lanes, count=_COUNT, axis=axis, num_warps=lanes // 32,
        )  # fmt: skip
    return losses.sum(), logits


@triton.jit  # type: ignore[untyped-decorator]
def _differentiate_row(  # type: ignore[no-untyped-def]
    logits,
    step,
    labels,
    label_step,
    losses,
    width,
    ignore_index,
    smoothing: tl.constexpr,
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
        for start in range(0, width, block):
            tl.store(logits + start + columns, 0.0, mask=start + columns < width)
        tl.store(losses + row, 0.0)
        return
    # Each lane keeps its own largest value and sum, so threads wait for each other once per row.
    largest = tl.full((lanes,), -1.0e38, tl.float32)
    exponentials = tl.zeros((lanes,), tl.float32)
    total = tl.zeros((lanes,), tl.float32)
    # Full blocks need no mask; the rest of the row does.
    whole = width // block * block
    for start in range(0, whole, block):
        values = tl.load(logits + start + columns).to(tl.float32)
        largest, exponentials = _add_exponentials(values, largest, exponentials, axis)
        if smoothing > 0:
            total += tl.sum(values, axis)
    is_word = whole + columns < width
    rest = tl.load(logits + whole + columns, mask=is_word, other=float("-inf")).to(tl.float32)
    largest, exponentials = _add_exponentials(rest, largest, exponentials, axis)
    above = tl.max(largest, 0)
    normalizer = above + tl.log(tl.sum(exponentials * tl.exp(largest - above), 0))
    is_known = (label >= 0) & (label < width)
    chosen = tl.load(logits + label, mask=is_known, other=float("nan")).to(tl.float32)
    loss = normalizer - (1 - smoothing) * chosen
    even = 0.0
    if smoothing > 0:
        total += tl.sum(tl.where(is_word, rest, 0.0), axis)
        even = smoothing / width
        loss -= even * tl.sum(total, 0)
    tl.store(losses + row, loss)
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
    values, largest, exponentials, axis: tl.constexpr
):
    """Add a block's exponentials to each lane's sum, with the lane's largest value taken out."""
    above = tl.maximum(largest, tl.max(values, axis))
    # exp2 takes one instruction less than exp: its multiplication and subtraction are fused.
    powers = tl.exp2(values * _LOG2_E - tl.expand_dims(above * _LOG2_E, axis))
    return above, exponentials * tl.exp(largest - above) + tl.sum(powers, axis)
