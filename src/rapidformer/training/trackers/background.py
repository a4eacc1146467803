"""A tracker in a thread of its own: a slow or broken one neither delays nor ends the run."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rapidformer.log import get_logger
from rapidformer.training.trackers.tracker import TrackedRun, Tracker, warn_of_loss

LONGEST = 10_000
"""Lines that wait for a slow tracker, about 1 kB each; later ones are left out."""
PATIENCE = 30.0
"""Seconds that the end of a run waits for a tracker; a run that fails waits a sixth of it."""


class Background:
    """Calls a tracker's methods in order, from one thread."""

    def __init__(self, tracker: Tracker, name: str | None = None) -> None:
        self.tracker = tracker
        self.name = name or type(tracker).__name__
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(LONGEST)
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._left_out = 0
        self._has_started = threading.Event()

    def start(self, run: TrackedRun) -> None:
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self._add(lambda: self.tracker.start(run))
        self._add(self._has_started.set)
        self._thread.start()

    def log(self, values: Mapping[str, Any], step: int | None, **options: Any) -> None:
        """``options``: more arguments of this tracker's ``log``."""
        if not self._is_over:
            self._add(lambda: self.tracker.log(values, step, **options))

    def wait_until_started(self, seconds: float = PATIENCE) -> bool:
        """Whether the tracker has begun, which may take a while; False also if it cannot."""
        return self._has_started.wait(seconds) and not self._is_over

    def finish(self) -> None:
        """Wait for what is still to be sent, but not for ever."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        has_failed = sys.exc_info()[0] is not None
        patience = PATIENCE / 6 if has_failed else PATIENCE
        if hasattr(self.tracker, "has_failed"):
            self.tracker.has_failed = has_failed
        deadline = time.monotonic() + patience
        for call in (self.tracker.finish, None):
            with suppress(queue.Full):
                self._calls.put(call, timeout=max(0.0, deadline - time.monotonic()))
        thread.join(max(0.0, deadline - time.monotonic()))
        waiting = self._calls.qsize()
        if thread.is_alive():
            get_logger().warning(
                "%s has not taken everything within %g s: about %d lines are missing there. "
                "metrics.jsonl has them all.", self.name, patience, self._left_out + waiting,
            )  # fmt: skip
        elif self._left_out:
            get_logger().warning(
                "%s was too slow: %d lines are missing there. metrics.jsonl has them all.",
                self.name, self._left_out,
            )  # fmt: skip
        self._is_over = True

    def _add(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._left_out += 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._is_over:
                try:
                    call()
                except (Exception, SystemExit) as reason:
                    warn_of_loss(self.name, reason)
                    self._is_over = True
                    self._has_started.set()
