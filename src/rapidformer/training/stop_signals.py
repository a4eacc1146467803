"""SIGTERM, SIGUSR1 and Ctrl-C during training: finish the step, save, and exit.

A second signal ends the process at once. Several ranks agree on the step at which they stop; there
Ctrl-C is left to the launcher, which ends all of them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch

from rapidformer.dist.heartbeat import announce_saving
from rapidformer.dist.stop_vote import StopVote

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}
_OF_SEVERAL_RANKS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Catches the first signal and stores it in ``caught``."""

    def __init__(
        self, say: Callable[[str], None], device: torch.device, *, saves: bool, is_alone: bool
    ) -> None:
        self.caught: signal.Signals | None = None
        self.is_agreed = False
        """Whether all ranks stop after the current step."""
        self._say, self._saves = say, saves
        self._numbers = tuple(_NAMES) if is_alone else _OF_SEVERAL_RANKS
        self._vote = StopVote(device)
        # Python lets only the main thread set handlers.
        self._is_active = threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if self._is_active:
            self._before = {number: signal.signal(number, self._catch) for number in self._numbers}
            announce_saving(is_ready=True)
        return self

    def __exit__(self, *_: Any) -> None:
        announce_saving(is_ready=False)
        self._put_back()

    @property
    def name(self) -> str:
        return _NAMES[self.caught] if self.caught is not None else ""

    def look(self, step: int, *, asks_others: bool) -> None:
        """Find out whether to stop after this step; every rank must call it after each step.

        If it ``asks_others``, a signal that only another rank has caught counts as well. That takes
        a message, so not every step should.
        """
        if self.caught is None and asks_others and (number := self._vote.find_signal()):
            self._catch(number, None)
        if self.caught is not None and not self.is_agreed:
            self.is_agreed = self._vote.is_over(step, self.caught)

    def leave(self) -> NoReturn:
        """Exit with 128 + the signal, as a shell expects: schedulers take it for a preemption."""
        if self.caught is None or self.caught == signal.SIGINT:
            raise KeyboardInterrupt("reported")
        raise SystemExit(128 + self.caught)

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
