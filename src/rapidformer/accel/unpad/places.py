"""Rows of a tensor by their places: gathered, scattered back, and places sent to the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gather(padded: Tensor, places: Tensor) -> Tensor:
    """The rows of ``padded``, [1, size, ...], at these places, which must be distinct.

    The leading 1 matters. Without it, the first block's input would be a view and the next block's
    would not, and dynamo would compile the two separately.
    """
    return _Gather.apply(padded, places)


def scatter(packed: Tensor, places: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """The reverse of ``gather``: ``size`` rows, with ``fill`` at all other places."""
    return _Scatter.apply(packed, places, size, fill)


def send(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A tensor in host memory on a device, for which nothing waits."""
    if device is None or tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        # From pinned memory, a copy to the device does not wait for the work before it.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class _Gather(torch.autograd.Function):
    """Copies in both directions: the gradient of ``index_select`` is a slow ``index_add``."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = padded.shape[1]
        return padded.index_select(1, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return scatter(gradient, places, ctx.size), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, places: Tensor, size: int, fill: float) -> Tensor:
        ctx.save_for_backward(places)
        padded = packed.new_full((1, size, *packed.shape[2:]), fill)
        return padded.index_copy_(1, places, packed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return gather(gradient, places), None, None, None
