"""The loss on the progress bar: a running mean, read without ever waiting for the device."""

from __future__ import annotations

import math

import torch

_DECAY = 0.9
"""Weight of the past: the mean covers about ten updates."""


class LiveLoss:
    """A running mean of this rank's losses."""

    def __init__(self, device: torch.device) -> None:
        self._mean = self._weight = 0.0
        self._is_async = device.type == "cuda"
        if self._is_async:
            self._slot = torch.zeros((), device="cpu", pin_memory=True)
            self._copied = torch.cuda.Event()
            self._is_copying = False

    @property
    def value(self) -> float | None:
        """The mean so far; None before the first loss has arrived."""
        return self._mean / self._weight if self._weight else None

    def add(self, loss: torch.Tensor) -> None:
        """Add an update's loss; on a GPU it arrives one update later, or is skipped."""
        if not self._is_async:
            self._take(float(loss))
        elif not self._is_copying or self._copied.query():
            if self._is_copying:
                self._take(float(self._slot))
            self._slot.copy_(loss.float(), non_blocking=True)
            self._copied.record()
            self._is_copying = True

    def _take(self, loss: float) -> None:
        # A NaN loss ends the run when the meter is read; the bar need not show it.
        if math.isfinite(loss):
            self._mean = _DECAY * self._mean + (1 - _DECAY) * loss
            self._weight = _DECAY * self._weight + (1 - _DECAY)
