"""Gradients of gradients (a gradient penalty) with respect to parameters that processes share.

With respect to inputs they are exact. A parameter's gradient, however, is a part of the true one on
each process until an update is finished, and a loss made from it would be another one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rapidformer.errors import TrainingError


def refuse_double_gradients(model: nn.Module, flag: str) -> None:
    """Raise where somebody differentiates a parameter's gradient (``create_graph=True``)."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(_build_check(name, flag))


def _build_check(name: str, flag: str) -> Callable[[Tensor], None]:
    def check(gradient: Tensor) -> None:
        # Backward passes run with gradients enabled only where a graph of them is asked for.
        if torch.is_grad_enabled():
            raise TrainingError(
                f"{flag}: the loss is made from the gradient of {name} (create_graph=True), of "
                "which each process has only its part. Penalise gradients with respect to inputs "
                f"or embeddings, or leave {flag} out."
            )

    return check
