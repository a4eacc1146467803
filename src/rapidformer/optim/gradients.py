"""Gradients of an update: scaling the loss, then taking, adding, measuring and clipping them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rapidformer.compat.torch_tensors import compute_norms
from rapidformer.optim.multi_tensor.launch import get_local
from rapidformer.optim.multi_tensor.norm import sum_squares


def scale_loss(loss: torch.Tensor, fraction: float | torch.Tensor, scale: float) -> torch.Tensor:
    """The loss times its fraction of the update; a fraction of 0 has no gradient at all."""
    if isinstance(fraction, torch.Tensor):
        return torch.where(fraction == 0, torch.zeros_like(loss), loss) * (fraction * scale)
    if fraction == 0.0:
        # A mean over no labels is NaN; its gradient must still be zero.
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0) * 0.0
    factor = fraction * scale
    return loss if factor == 1.0 else loss * factor


def take_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    """Remove the gradients and return them: the next backward pass starts from none."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def add_gradients(
    parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Add gradients that ``take_gradients`` removed to those that came since."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad.add_(gradient)


def get_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm over gradients that may be split along some axes and whole along others.

    One reduction per axis. What several ranks hold whole is counted by each of them in part, so
    that the sum counts it once.
    """
    plain = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    sums = [_square_norm(plain)] if plain else []
    parts: dict[DeviceMesh, dict[int, list[torch.Tensor]]] = {}
    for gradient in gradients if len(plain) < len(gradients) else ():
        if isinstance(gradient, DTensor):
            mesh, copies = gradient.device_mesh, 1
            for axis, placement in enumerate(gradient.placements):
                copies *= mesh.size(axis) if placement.is_replicate() else 1
            squares = parts.setdefault(mesh, defaultdict(list))
            squares[copies].append(get_local(gradient))
    sums += [_sum_squares(squares, mesh) for mesh, squares in parts.items()]
    return _add(sums).sqrt().float() if sums else torch.tensor(0.0)


def _sum_squares(squares: dict[int, list[torch.Tensor]], mesh: DeviceMesh) -> torch.Tensor:
    """Over all ranks of the mesh that these are split on."""
    sums = [(copies, _square_norm(some)) for copies, some in squares.items()]
    total = _add([part / copies if copies > 1 else part for copies, part in sums])
    for axis in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(axis))
    return total


def _add(numbers: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(numbers).sum() if len(numbers) > 1 else numbers[0]


def _square_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = sum_squares(tensors)
    if total is not None:
        return total
    norms = compute_norms([_shorten(tensor) for tensor in tensors])
    return torch.stack(norms).double().square().sum()


def _shorten(tensor: torch.Tensor) -> torch.Tensor:
    """A large matrix on a CPU as the norms of its rows: fp32 squares of millions add up badly."""
    if tensor.device.type != "cpu" or tensor.dim() < 2 or tensor.numel() < 2**16:
        return tensor
    rows: torch.Tensor = torch.linalg.vector_norm(tensor, dim=-1)
    return rows


def get_divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What clipping divides a gradient by: the inverse of ``UpdateClock.clip``'s factor."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)
