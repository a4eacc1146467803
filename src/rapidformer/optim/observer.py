"""Observe a training run, whichever loop drives it: a template's or the user's own.

The engine reports every loss, every finished gradient (summed over ranks and divided, not yet
clipped) and every update to the current observer. By default there is none. Either every rank has
the observer or none does, because looking at split tensors is collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from rapidformer.config import Settings


class RunFinished(BaseException):
    """An observer has seen enough. Not an ``Exception``, so a loop's ``except`` lets it pass."""


class RunObserver:
    """Observes a run; a subclass overrides what it wants to see."""

    def change_settings(self, args: Settings) -> Settings:
        """Called once by each engine, first of all; the engine uses the returned settings."""
        return args

    def before_compose(self, model: nn.Module) -> None:
        """The model as the user made it."""

    def after_compose(self, engine: Any) -> None:
        """The engine with every switch applied."""

    def see_loss(
        self, loss: torch.Tensor, weight: float | torch.Tensor, info: Any, *, is_given: bool
    ) -> None:
        """A micro-batch's mean loss, its weight (``is_given`` by the script) and its counts."""

    def see_training_data(self, dataset: Any, collate: Any) -> None:
        """The training data, and what makes a batch of its rows."""

    def before_update(self, forward: Any, update: Any) -> None:
        """An update is about to run: its forward step, and its micro-batches on this rank."""

    def see_phase(self, phase: str) -> None:
        """A part of an update has ended: ``data``, ``forward``, ``backward``, or ``loop`` (the
        training loop's own work). ``see_update`` ends the last part."""

    def see_gradients(self) -> None:
        """The gradient of an update is in ``.grad``."""

    def choose_clip(self, max_norm: float, norm: torch.Tensor) -> float:
        """The gradient is about to be clipped; returns the norm to clip it to."""
        return max_norm

    def see_update(self) -> None:
        """The weights have been updated."""


_current = RunObserver()


def get_observer() -> RunObserver:
    """The current observer, or one that does nothing."""
    return _current


@contextmanager
def observe_runs(observer: RunObserver) -> Iterator[None]:
    """Let the observer see every run inside, and end what is inside by ``RunFinished``."""
    global _current
    before, _current = _current, observer
    try:
        with suppress(RunFinished):
            yield
    finally:
        _current = before
