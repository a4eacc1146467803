"""Attention of one row in fp32 with dropout, on CPUs whose torch has no MKL, such as ARM's.

There, a batched product whose second factor is transposed takes five times as long as one with a
contiguous copy. torch's attention with dropout has such a product in each pass, and autograd would
add one to ours, so these products define their own gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional


def suits(query: Tensor, dropout: float) -> bool:
    """Whether torch's own attention would be slower. Without dropout it is a fused kernel."""
    is_fp32 = query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    is_slow = query.device.type == "cpu" and not torch.backends.mkl.is_available()
    return dropout > 0 and is_fp32 and is_slow


def attend_row(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None, is_causal: bool
) -> Tensor:
    """As ``scaled_dot_product_attention`` without a mask, on [1, heads, tokens, size]."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (each.squeeze(0) for each in (query * scale, key, value))
    scores = _Product.apply(q, k, True)
    if is_causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = functional.dropout(scores.softmax(-1), dropout)
    attended: Tensor = _Product.apply(weights, v, False)
    return attended[None]


class _Product(Function):
    """left x right, or left x right^T, for batches of matrices."""

    generate_vmap_rule = True  # with setup_context, this lets torch.func differentiate a model

    @staticmethod
    def forward(left: Tensor, right: Tensor, is_transposed: bool) -> Tensor:
        return left.bmm(right.transpose(1, 2).contiguous() if is_transposed else right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.is_transposed = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right = ctx.saved_tensors
        first, second = (gradient, left) if ctx.is_transposed else (left, gradient)
        of_left = _Product.apply(gradient, right, not ctx.is_transposed)
        return of_left, first.transpose(1, 2).bmm(second), None
