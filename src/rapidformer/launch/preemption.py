"""SIGTERM and SIGUSR1 to the launcher: the ranks save and exit, if they can.

A scheduler sends them before it takes the machine away. They are passed on if every rank of this
node trains, and thus saves when it gets one; otherwise all processes are ended, as by Ctrl-C. A
second signal ends them in any case.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from rapidformer.launch.worker import get_saving_path

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Listens while the ranks of a round run."""

    def __init__(self, scratch: Path, say: Callable[[str], None]) -> None:
        self.caught: signal.Signals | None = None
        """The signal that was passed on."""
        self._scratch = scratch
        self._say = say
        self._ranks: dict[int, int] = {}

    def begin_round(self, process_ids: dict[int, int]) -> None:
        """Listen for these ranks; torch's agent has just installed its own handlers."""
        self._ranks = process_ids
        for rank in process_ids:
            get_saving_path(self._scratch, rank).unlink(missing_ok=True)
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._catch)

    def is_outcome(self, status: int) -> bool:
        """Whether a rank that ended with this status did what the signal asked for."""
        return self.caught is not None and status in (128 + self.caught, -self.caught)

    def _catch(self, number: int, frame: FrameType | None) -> Any:
        name = signal.Signals(number)
        if self.caught is not None or not self._can_save():
            raise SignalException(f"got {name.name}", name)
        self.caught = name
        self._say(f"{name.name}: passed on to the ranks, which save and exit.")
        for pid in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _can_save(self) -> bool:
        return all(get_saving_path(self._scratch, rank).exists() for rank in self._ranks)
