"""The loss of a chunk of logits and its gradient in one Triton kernel.

Eager torch reads and writes a chunk's logits about ten times; here each row is read twice, the
second time from the cache, and the gradient is written once, over the logits. It does not need
``--compile``: the kernel is ready in a second and takes any number of rows.

Import this module only if Triton is installed; torch's CPU builds come without it.
"""

# ruff: noqa: ANN001, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

_BLOCK = 8192


def differentiate_in_place(
    logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The sum of the rows' cross entropies, and its gradient, which replaces the logits.

    A label outside the vocabulary makes the loss NaN.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    rows, width = logits.shape
    block = min(triton.next_power_of_2(width), _BLOCK)
    _differentiate_row[(rows,)](
        logits, logits.stride(0), labels, labels.stride(0), losses, width,
        ignore_index, smoothing, block=block, num_warps=max(4, block // 512),
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
    smoothing,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row * label_step)
    logits += row * step
    columns = tl.arange(0, block)
    if label == ignore_index:
        for start in range(0, width, block):
            tl.store(logits + start + columns, 0.0, mask=start + columns < width)
        tl.store(losses + row, 0.0)
        return
    # The log of the sum of exponentials, with the largest value so far taken out.
    largest = tl.full((), -3.0e38, tl.float32)
    exponentials = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, width, block):
        is_word = start + columns < width
        values = tl.load(logits + start + columns, mask=is_word, other=float("-inf")).to(tl.float32)
        above = tl.maximum(largest, tl.max(values, 0))
        exponentials = exponentials * tl.exp(largest - above) + tl.sum(tl.exp(values - above), 0)
        largest = above
        total += tl.sum(tl.where(is_word, values, 0.0), 0)
    normalizer = largest + tl.log(exponentials)
    is_known = (label >= 0) & (label < width)
    chosen = tl.load(logits + label, mask=is_known, other=float("nan")).to(tl.float32)
    loss = normalizer - (1 - smoothing) * chosen
    if smoothing > 0:
        loss -= smoothing * total / width
    tl.store(losses + row, loss)
    # Every thread has read the label's logit before one of them overwrites it.
    tl.debug_barrier()
    for start in range(0, width, block):
        places = start + columns
        is_word = places < width
        values = tl.load(logits + places, mask=is_word, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(values - normalizer) - smoothing / width
        gradient -= tl.where(places == label, 1 - smoothing, 0.0)
        tl.store(logits + places, gradient, mask=is_word)
