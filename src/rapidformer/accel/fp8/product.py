"""A linear layer whose three matrix products are in fp8, each tensor with one scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.compat.torch_dispatch import multiply_scaled

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
PART = 4096
"""How many elements one kernel program searches for the largest value."""
_SMALLEST_VALUE = 1e-30
MULTIPLE = 16
"""The sizes of a product must be multiples of this."""


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``functional.linear`` with an fp8 product, under autocast."""
    rows, added = lay_out(input)
    output = restore(_Product.apply(rows, weight), input, added)
    return output if bias is None else output + bias.to(output.dtype)


def lay_out(input: Tensor) -> tuple[Tensor, int]:
    """The input as rows in autocast's dtype, and how many rows of zeros fill it up to 16's."""
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


def quantize(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in fp8, and the scale to multiply it by to get it back."""
    scale = get_scale(tensor.abs().amax(), dtype)
    return scale_down(tensor.float(), scale, dtype), scale


def get_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """What a tensor with this largest absolute value is divided by."""
    return largest.float().clamp(min=_SMALLEST_VALUE) / torch.finfo(dtype).max


def scale_down(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor / scale`` in fp8."""
    largest = torch.finfo(dtype).max
    # Casting does not saturate: a value that is rounded above the largest would become NaN.
    return (tensor / scale).clamp(-largest, largest).to(dtype)
