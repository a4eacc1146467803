"""Gradients of gradients (a gradient penalty) with respect to parameters split over ranks.

With respect to inputs they are exact. But until an update is finished, each rank has only a part of
a parameter's gradient, so a loss computed from it would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rapidformer.errors import TrainingError


def refuse_double_gradients(model: nn.Module, flag: str) -> None:
    """Raise if a parameter's gradient is differentiated (``create_graph=True``)."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(_build_check(name, flag))


def _build_check(name: str, flag: str) -> Callable[[Tensor], None]:
    def check(gradient: Tensor) -> None:
        # Backward passes run with gradients enabled only if a graph of them was requested.
        if torch.is_grad_enabled():
            raise TrainingError(
                f"{flag}: the loss uses the gradient of {name} (create_graph=True), but each rank "
                "has only a part of that gradient. Penalise gradients with respect to inputs or "
                f"embeddings, or remove {flag}."
            )

    return check
