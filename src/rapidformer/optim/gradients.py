"""Gradients of an update: scaling the loss, then taking, adding, measuring and clipping them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rapidformer.compat.torch_clipping import check_clipping, find_unknown_norm
from rapidformer.compat.torch_tensors import compute_norms, count_changes, multiply_all
from rapidformer.dist.whole import get_shard
from rapidformer.errors import RapidformerError
from rapidformer.optim.multi_tensor.norm import sum_squares

_TOO_EARLY = (
    "gradients were changed between two micro-batches of an update. They are no gradients yet, but "
    "sums that still lack the rest of the global batch. Clip with engine.clip_grad_norm(max_norm), "
    "which waits until they are complete, and make other changes only then: `if not "
    "engine.updates.clock.is_accumulating:`. A second loss of the same micro-batch is added to the "
    "first: engine.backward(loss + other)."
)


class GradientKeeper(Protocol):
    """A strategy that keeps gradients itself, such as DeepSpeed."""

    @property
    def device(self) -> torch.device: ...

    def finish(self, divisor: float) -> torch.Tensor:
        """Divide the sums; returns the norm of the result."""

    def set_clip(self, max_norm: float, norm: torch.Tensor) -> None: ...

    def update(self) -> None: ...

    def drop(self) -> None:
        """Discard a gradient that is not finite."""


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


class HeldGradients:
    """The sums of an update between its micro-batches, which are nobody else's to change."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._held = [(p, p.grad, _count_changes(p.grad)) for p in parameters]
        self._leave: Callable[[], object] = lambda: None
        if find_unknown_norm() is None:
            # At the line that clips. Split tensors do not even count that they were changed.
            refusing = check_clipping(partial(_refuse_clip, {id(g) for _, g, _ in self._held}))
            refusing.__enter__()
            self._leave = finalize(self, refusing.__exit__, None, None, None)

    def put_back(self) -> None:
        """Clearing waits for the update, as the optimizer's own ``zero_grad()`` does."""
        self._leave()
        for parameter, gradient, changes in self._held:
            if parameter.grad is None:
                parameter.grad = gradient
            if parameter.grad is not gradient or _count_changes(gradient) != changes:
                raise RapidformerError(_TOO_EARLY)


def _count_changes(gradient: torch.Tensor | None) -> int:
    # A change of a split tensor is counted by itself or by its local part.
    return 0 if gradient is None else count_changes(gradient) + count_changes(get_shard(gradient))


def _refuse_clip(held: set[int], gradients: list[torch.Tensor]) -> None:
    if any(id(gradient) in held for gradient in gradients):
        raise RapidformerError(_TOO_EARLY)


def get_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm over gradients that are split along some axes, by one reduction per axis."""
    sums = [sum_over_mesh(total, mesh) for mesh, total in sum_all_squares(gradients).items()]
    return _add(sums).sqrt().float() if sums else torch.tensor(0.0)


def sum_all_squares(gradients: Sequence[torch.Tensor]) -> dict[DeviceMesh | None, torch.Tensor]:
    """This rank's part of the sum of squares, by the mesh that gradients are split on."""
    plain = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    sums: dict[DeviceMesh | None, torch.Tensor] = {None: _square_norm(plain)} if plain else {}
    parts: dict[DeviceMesh, dict[int, list[torch.Tensor]]] = {}
    for gradient in gradients if len(plain) < len(gradients) else ():
        if isinstance(gradient, DTensor):
            mesh, copies = gradient.device_mesh, 1
            for axis, placement in enumerate(gradient.placements):
                copies *= mesh.size(axis) if placement.is_replicate() else 1
            squares = parts.setdefault(mesh, defaultdict(list))
            squares[copies].append(get_shard(gradient))
    for mesh, squares in parts.items():
        each = [(copies, _square_norm(some)) for copies, some in squares.items()]
        sums[mesh] = _add([part / copies if copies > 1 else part for copies, part in each])
    return sums


def sum_over_mesh(total: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """Sum in place over all ranks of the mesh."""
    for group in mesh.get_all_groups() if mesh is not None else ():
        dist.all_reduce(total, group=group)
    return total


def _add(numbers: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(numbers).sum() if len(numbers) > 1 else numbers[0]


def _square_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    tensors = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    total = sum_squares(tensors)
    if total is not None:
        return total
    norms = compute_norms([_shorten(tensor) for tensor in tensors])
    return torch.stack(norms).double().square().sum()


def _shorten(tensor: torch.Tensor) -> torch.Tensor:
    """A large matrix on a CPU as the norms of its rows: fp32 squares of millions add up badly."""
    if tensor.device.type != "cpu" or tensor.dim() < 2 or tensor.numel() < 2**16:
        return tensor
    return torch.linalg.vector_norm(tensor, dim=-1)


def clip_norm(
    gradients: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor | None = None
) -> torch.Tensor:
    """Scale gradients down to a norm, with torch's own arithmetic; returns the norm before."""
    norm = get_norm(gradients) if norm is None else norm
    local = [get_shard(gradient) for gradient in gradients]
    if local and max_norm > 0:
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # The norm of a pipeline's offloaded gradients is on the device.
        multiply_all(local, coefficient.to(local[0].device))
    return norm


def get_divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What clipping divides a gradient by: the inverse of ``UpdateClock.clip``'s factor."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)
