"""Scale tensors and round them to fp8, with one scale per tensor."""

from __future__ import annotations

import torch
from torch import Tensor

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
PART = 4096
"""How many elements one kernel program searches for the largest value."""
_SMALLEST_VALUE = 1e-30


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
