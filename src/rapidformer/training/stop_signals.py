"""Ctrl-C and SIGTERM during training: finish the update, save, and exit. A second one exits at
once.

Only with a single rank. Several ranks must stop at the same update, which signals that reach them
one by one cannot ensure: there the launcher stops all of them, and the run resumes from a
checkpoint.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopSignals:
    """Catches the first signal and stores it in ``caught``."""

    def __init__(self, say: Callable[[str], None], *, saves: bool, is_alone: bool) -> None:
        self.caught: signal.Signals | None = None
        self._say = say
        self._saves = saves
        # Python lets only the main thread set handlers.
        self._is_active = is_alone and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if self._is_active:
            self._before = {number: signal.signal(number, self._catch) for number in _NAMES}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._put_back()

    @property
    def name(self) -> str:
        return _NAMES[self.caught] if self.caught is not None else ""

    def leave(self) -> NoReturn:
        """Exit as the signal asked, with the exit status that a shell expects."""
        if self.caught == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt("reported")

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number)
        self._put_back()
        how = "saves a checkpoint" if self._saves else "saves nothing (no --save folder)"
        self._say(
            f"{self.name}: training finishes this step, {how} and stops. "
            "A second signal stops at once."
        )

    def _put_back(self) -> None:
        for number, action in self._before.items():
            signal.signal(number, action)
        self._before = {}
