"""SIGTERM, SIGUSR1 and Ctrl-C during training: finish the step, save, and exit.

A second signal ends the process at once. Several ranks agree on the step at which they stop; there
Ctrl-C is left to the launcher, which ends all of them.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from rapidformer.compat.torch_distributed import get_default_store
from rapidformer.dist.collectives import is_alone
from rapidformer.dist.heartbeat import announce_saving

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
        """Whether to stop after this step; every rank asks. ``asks_others`` takes a message."""
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


_MARGIN = 2
_numbers = itertools.count()


class StopVote:
    """This rank's part in agreeing, without a collective, on the step at which all ranks stop.

    A signal reaches the ranks at different steps, or only one of them. Each posts the step at which
    it noticed and trains on, since another may be waiting for it in a collective; once all have
    posted, the run stops two steps after the latest. Nobody is past that step by then: a rank that
    has noticed waits for its device after every step, so the others have at least begun the step
    that it ends. The second step is for ranks that share collectives only through a third.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A process may train twice; what was posted stays in the store.
        self._key = f"rapidformer/stop/{next(_numbers)}"
        self._has_posted = False
        self._last_step: int | None = None

    def find_signal(self) -> int | None:
        """The signal that another rank has caught, if any."""
        key = f"{self._key}/signal"
        if is_alone() or not get_default_store().check([key]):
            return None
        return int(get_default_store().get(key))

    def is_over(self, step: int, number: int) -> bool:
        """Whether to stop after this step; ask after every step once a signal was caught."""
        if is_alone():
            return True
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        store = get_default_store()
        if not self._has_posted:
            store.set(f"{self._key}/signal", str(number))
            store.set(f"{self._key}/{dist.get_rank()}", str(step))
            self._has_posted = True
        keys = [f"{self._key}/{rank}" for rank in range(dist.get_world_size())]
        if self._last_step is None and store.check(keys):
            self._last_step = max(int(store.get(key)) for key in keys) + _MARGIN
        return self._last_step is not None and step >= self._last_step
