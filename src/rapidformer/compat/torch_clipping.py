"""Clipping: the norm that torch's own ``clip_grad_norm_`` uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

PRIVATE_NAMES = {
    "torch.nn.utils.clip_grad._get_total_norm": "torch's clip_grad_norm_ under a pipeline",
}

TotalNorm = Callable[[list[Tensor], float], Tensor]
Measure = Callable[[list[Tensor], float, TotalNorm], Tensor | None]
"""The norm of these gradients over more than this rank; None if they are not its concern."""


@contextmanager
def extend_total_norm(measure: Measure) -> Iterator[None]:
    """Inside, ``clip_grad_norm_`` asks ``measure`` first, wherever it was imported from."""
    before = clip_grad._get_total_norm

    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)

        def compute(some: list[Tensor], order: float) -> Tensor:
            return before(some, order, False, foreach)

        norm = measure(gradients, float(norm_type), compute)
        if norm is None:
            return before(gradients, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of order {norm_type} of these gradients is {norm}.")
        return norm

    clip_grad._get_total_norm = get_total_norm
    try:
        yield
    finally:
        # A second pipeline's may lie on top, and asks this one's owner in vain from now on.
        if clip_grad._get_total_norm is get_total_norm:
            clip_grad._get_total_norm = before
