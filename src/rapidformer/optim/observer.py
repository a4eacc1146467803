"""Somebody who looks on while a run trains, whichever loop drives it: a template's or a user's own.

The engine tells the current observer of every loss, of every finished gradient (summed over the
processes and divided, not yet clipped) and of every update. By default nobody looks on. What a
reader would get wrong: every process of a run must have the observer, or none, since to look at
split tensors takes all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rapidformer.config import Settings


class RunObserver:
    """Sees a run; a subclass overrides what it wants to see."""

    def change_settings(self, args: Settings) -> Settings:
        """Called once by each engine, before it does anything: its settings are what returns."""
        return args

    def before_compose(self, model: nn.Module) -> None:
        """The model as the user made it."""

    def after_compose(self, engine: Any) -> None:
        """The engine with every switch on."""

    def see_loss(self, loss: torch.Tensor, weight: float | torch.Tensor, info: Any) -> None:
        """A micro-batch's mean loss, what it is a mean over, and the loader's counts of it.

        All stages of a pipeline see what the last one has computed.
        """

    def see_gradients(self) -> None:
        """The gradient of an update stands in ``.grad``."""

    def see_update(self) -> None:
        """The weights have been updated."""


_current = RunObserver()


def get_observer() -> RunObserver:
    """Who looks on; one who sees nothing, where nobody does."""
    return _current


@contextmanager
def observe_runs(observer: RunObserver) -> Iterator[None]:
    """Let the observer see every run inside."""
    global _current
    before, _current = _current, observer
    try:
        yield
    finally:
        _current = before
