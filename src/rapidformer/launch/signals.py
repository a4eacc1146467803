"""Signals to a launcher: what they do for a while, and those that ask the ranks to save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rapidformer.launch.worker import get_rank_file

SAVING = (signal.SIGTERM, signal.SIGUSR1)
Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Handler) -> Iterator[None]:
    """Inside, these signals are handled like this, in the main thread; ``nohup`` stays obeyed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, handler) for n in numbers if not _is_turned_off(n)}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _is_turned_off(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def raise_signal(number: int, frame: FrameType | None) -> NoReturn:
    """As torch's agent does, but it starts to listen only when its workers run."""
    from torch.distributed.elastic.multiprocessing import SignalException

    name = signal.Signals(number)
    raise SignalException(f"got {name.name}", name)


class Preemption:
    """SIGTERM and SIGUSR1 while the ranks of a round run: they save and exit, if they can.

    A scheduler sends them before it takes the machine away. They are passed on if every rank of
    this node trains, and thus saves when it gets one; otherwise all processes are ended, as by
    Ctrl-C. A second signal ends them in any case.
    """

    def __init__(self, scratch: Path, say: Callable[[str], None]) -> None:
        self.caught: signal.Signals | None = None
        """The signal that was passed on."""
        self._scratch, self._say = scratch, say
        self._ranks: dict[int, int] = {}
        self._outlives_terminal = _is_turned_off(signal.SIGHUP)

    def begin_round(self, process_ids: dict[int, int]) -> None:
        """Listen for these ranks; torch's agent has just installed its own handlers."""
        self._ranks = process_ids
        for rank in process_ids:
            get_rank_file("saving", self._scratch, rank).unlink(missing_ok=True)
        if threading.current_thread() is threading.main_thread():
            for number in SAVING:
                signal.signal(number, self._catch)
            if self._outlives_terminal:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def is_outcome(self, status: int) -> bool:
        """Whether a rank that ended with this status did what the signal asked for."""
        return self.caught is not None and status in (128 + self.caught, -self.caught)

    def _catch(self, number: int, frame: FrameType | None) -> Any:
        paths = [get_rank_file("saving", self._scratch, rank) for rank in self._ranks]
        if self.caught is not None or not all(path.exists() for path in paths):
            raise_signal(number, frame)
        self.caught = signal.Signals(number)
        self._say(f"{self.caught.name}: passed on to the ranks, which save and exit.")
        for pid in self._ranks.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
