"""A linear layer whose three matrix products, one forward and two backward, are in fp8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.fp8.rounding import BACKWARD, FORWARD, quantize
from rapidformer.compat.torch_dispatch import multiply_scaled

MULTIPLE = 16
"""The sizes of a product must be multiples of this."""


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``functional.linear`` with an fp8 product, under autocast."""
    rows, added = lay_out(input)
    output: Tensor = _Product.apply(rows, weight)
    output = restore(output, input, added)
    return output if bias is None else output + bias.to(output.dtype)


def lay_out(input: Tensor) -> tuple[Tensor, int]:
    """The input as rows in autocast's dtype, and how many rows of zeros were added.

    The weight's gradient is a sum over rows, of which fp8 products need a multiple of 16.
    """
    dtype = torch.get_autocast_dtype(input.device.type)
    rows = input.to(dtype).reshape(-1, input.shape[-1])
    missing = -rows.shape[0] % MULTIPLE
    return (functional.pad(rows, (0, 0, 0, missing)) if missing else rows), missing


def restore(output: Tensor, input: Tensor, added: int) -> Tensor:
    """The output in the input's shape, without the added rows."""
    if added:
        output = output[:-added]
    return output.reshape(*input.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """``rows @ weight.t()``. What it keeps for the backward pass is in fp8 too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        small_rows, rows_scale = quantize(rows, FORWARD)
        small_weight, weight_scale = quantize(weight, FORWARD)
        # Only the weight's gradient needs the rows: a frozen layer keeps none.
        kept = (small_rows, rows_scale) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(small_weight, weight_scale, *kept)
        ctx.dtypes = rows.dtype, weight.dtype
        return multiply_scaled(
            small_rows, rows_scale, small_weight.t(), weight_scale, dtype=rows.dtype, is_fast=True
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, weight_scale, *kept = ctx.saved_tensors
        rows_dtype, weight_dtype = ctx.dtypes
        gradient, scale = quantize(gradient, BACKWARD)
        to_rows = to_weight = None
        if ctx.needs_input_grad[0]:
            to_rows = multiply_scaled(gradient, scale, weight, weight_scale, dtype=rows_dtype)
        if ctx.needs_input_grad[1]:
            to_weight = multiply_scaled(gradient.t(), scale, *kept, dtype=weight_dtype)
        return to_rows, to_weight
