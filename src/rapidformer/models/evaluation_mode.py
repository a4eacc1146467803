"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model evaluates; then every module has its own mode again, frozen ones too."""
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # From the outside in: each call also sets the modules inside, which follow.
        for module, mode in was_training:
            if module.training != mode:
                module.train(mode)
