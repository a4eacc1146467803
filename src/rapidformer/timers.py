"""Named timers: ``timers("forward").start()``; each start and stop waits for the device."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from rapidformer.errors import RapidformerError
from rapidformer.log import get_logger


class Timer:
    def __init__(self, name: str) -> None:
        self.name = name
        self._elapsed = 0.0
        self._started_at: float | None = None

    def start(self) -> None:
        if self._started_at is not None:
            raise RapidformerError(f"timer {self.name!r} is already running.")
        _wait_for_device()
        self._started_at = time.perf_counter()

    def stop(self) -> None:
        if self._started_at is None:
            raise RapidformerError(f"timer {self.name!r} is not running.")
        _wait_for_device()
        self._elapsed += time.perf_counter() - self._started_at
        self._started_at = None

    def reset(self) -> None:
        self._elapsed, self._started_at = 0.0, None

    def elapsed(self, reset: bool = True) -> float:
        """Seconds measured so far; a running timer keeps running."""
        was_running = self._started_at is not None
        if was_running:
            self.stop()
        seconds = self._elapsed
        if reset:
            self.reset()
        if was_running:
            self.start()
        return seconds


class Timers:
    """Timers by name, created on first use."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self._timers.setdefault(name, Timer(name))

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Log milliseconds per name."""
        parts = [
            f"{name}: {self._timers[name].elapsed(reset) * 1000 / normalizer:.2f}"
            for name in names
            if name in self._timers
        ]
        get_logger().info("time (ms) | %s", " | ".join(parts))

    def write(
        self,
        names: Iterable[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = False,
    ) -> None:
        """Write seconds per name to a TensorBoard writer."""
        for name in names:
            seconds = self(name).elapsed(reset) / normalizer
            writer.add_scalar(f"{name}-time", seconds, iteration)


def _wait_for_device() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
