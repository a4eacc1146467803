"""Find out whether all ranks have come to a call that scripts also make on rank 0 alone.

``if rank == 0: engine.save_checkpoint(...)`` is a habit from DistributedDataParallel. The other
ranks are elsewhere by then, and the first collective would wait for them in vain. So rank 0 asks
before it enters one, through the store by which the ranks have found each other. On every other
rank a thread answers, which otherwise sleeps: this rank has come to the same call; or it cannot
come any more, because it trains on, has ended, or waits in another such call or in a collective of
all ranks that rank 0 has not entered. A rank that waits for another one than rank 0 may still come.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from rapidformer.compat.torch_distributed import (
    count_collectives,
    find_frame,
    get_default_store,
)
from rapidformer.dist.collectives import apart, is_alone
from rapidformer.errors import RapidformerError
from rapidformer.log import warn_once

_BRIEF_PATIENCE = timedelta(minutes=1)
"""For a rank that shows no sign of being elsewhere, if rank 0 can do without it."""
_NEVER = timedelta(days=365)
_LOOK_SECONDS = 0.1
_STUCK_SECONDS = 1.0
"""From here on, a rank that is in a collective waits there."""
_HERE = "here"
_ABOVE = ("torch", "rapidformer")
"""Packages whose lines say nothing to the user about where a rank is."""
_DECORATED = "wrapper"
"""What torch calls the function around each collective."""
_BETWEEN_TWO = ("send", "recv", "batch_isend_irecv")
_KEY = "rapidformer/attendance"

_is_together: ContextVar[bool] = ContextVar("is_together", default=False)


@contextmanager
def attending(call: str, *, needs_all: str | None, alone: str = "") -> Iterator[bool]:
    """Enter a call; yields whether this rank has to do anything in it.

    ``needs_all`` says why all ranks must take part: if one does not come, the others get an error.
    Otherwise rank 0 works alone, and ``alone`` says what is lost by that.
    """
    roll = _get_roll()
    if roll is None or is_alone() or _is_together.get():
        yield True
        return
    absent = roll.call(call, _BRIEF_PATIENCE if needs_all is None else roll.patience)
    if absent and needs_all is not None:
        raise RapidformerError(
            f"{call} was called on rank 0, and not on every rank ({_join(absent)}), but "
            f"{needs_all}: call it on all of them, outside of `if rank == 0`."
        )
    if not absent:
        token = _is_together.set(True)
        try:
            yield True
        finally:
            _is_together.reset(token)
    elif dist.get_rank() == 0:
        if alone:
            warn_once(f"{call} was called on rank 0 alone ({_join(absent)}): {alone}")
        with apart():
            yield True
    else:
        yield False


def _join(absent: list[str]) -> str:
    more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
    return ", ".join(absent[:3]) + more


# ---- what only rank 0 needs to do --------------------------------------------------------------


def run_by_first(call: str, action: Callable[[], None]) -> None:
    """Do on rank 0 what needs no other one; those that come wait for it, and raise its error."""
    roll = _get_roll()
    if roll is None or is_alone() or _is_together.get():
        action()
        return
    number = _counts[call] = _counts.get(call, -1) + 1
    key, store = f"{_KEY}/done/{call}/{number}", get_default_store()
    if dist.get_rank() == 0:
        with apart():
            _post_outcome(action, key, store)
        return
    _wait_for(f"{key}/begun", store, call, roll.patience)
    _wait_for(key, store, call, _NEVER)
    if (error := pickle.loads(store.get(key))) is not None:
        raise error


_counts: dict[str, int] = {}
"""How often each was called on this rank."""


def _post_outcome(action: Callable[[], None], key: str, store: Any) -> None:
    store.set(f"{key}/begun", "1")
    error: Exception | None = RapidformerError("rank 0 was interrupted")
    try:
        action()
        error = None
    except RapidformerError as reason:
        error = reason
        raise
    except Exception as reason:
        error = RapidformerError(f"rank 0 failed with {type(reason).__name__}: {reason}")
        raise
    finally:
        store.set(key, pickle.dumps(error))


def _wait_for(key: str, store: Any, call: str, patience: timedelta) -> None:
    # Not the store's own waiting, which Ctrl-C does not end, and which keeps other threads out.
    deadline, pauses = time.monotonic() + patience.total_seconds(), _pause_longer()
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RapidformerError(
                f"{call} was called on rank {dist.get_rank()}, and not on rank 0: call it there."
            )
        time.sleep(next(pauses))


# ---- where the others are ----------------------------------------------------------------------


_progress = 0


def note_progress() -> None:
    """This rank has begun another micro-batch, as all ranks do equally often."""
    global _progress
    _progress += 1


class _Roll(ABC):
    """The questions of rank 0 and what becomes of them; each rank has one."""

    def __init__(self) -> None:
        self.patience: timedelta = get_default_store().timeout
        """As long as for a rank that is missing in a collective."""
        global _started
        _started += 1
        # A store may outlive its process group, and serve the next one.
        self._prefix = f"{_KEY}/{_started}"
        self._number = 0
        """Of the next question."""
        self._is_over = False
        self._process, self._group = os.getpid(), ref(dist.group.WORLD)
        atexit.register(self.leave)

    @property
    def is_valid(self) -> bool:
        """Whether it is of the process group that there is now."""
        return dist.is_initialized() and self._group() is dist.group.WORLD

    @abstractmethod
    def call(self, call: str, patience: timedelta) -> list[str]:
        """Where the ranks are that have not come to this call; every rank that has, calls this."""

    def leave(self) -> None:
        """Before the process group is left: nobody shall wait for this rank."""
        atexit.unregister(self.leave)
        # A forked process shares the connection to the store, and must not use it.
        if not self._is_over and self._process == os.getpid():
            self._is_over = True
            with suppress(RuntimeError):  # the store is gone
                self._say_goodbye()

    @abstractmethod
    def _say_goodbye(self) -> None:
        """Tell the others that this rank is gone."""

    def name(self, kind: str, rank: int | None = None) -> str:
        parts = [self._prefix, str(self._number), kind, *([] if rank is None else [str(rank)])]
        return "/".join(parts)

    def name_end(self, rank: int) -> str:
        return f"{self._prefix}/ended/{rank}"


class _Asking(_Roll):
    """Rank 0's. It does not keep the store: a process group that is left takes it with it."""

    def call(self, call: str, patience: timedelta) -> list[str]:
        store, absent = get_default_store(), ["rank 0 was interrupted"]
        self._ask([call, _progress, count_collectives()])
        try:
            answers = self._collect(store, time.monotonic() + patience.total_seconds())
            absent = [f"rank {rank} {text}" for rank, text in answers.items() if text != _HERE]
        finally:
            store.set(self.name("verdict"), json.dumps(absent))
            self._number += 1
        return absent

    def _ask(self, question: list[Any] | None) -> None:
        for rank in range(1, dist.get_world_size()):
            get_default_store().set(self.name("question", rank), json.dumps(question))

    def _collect(self, store: Any, deadline: float) -> dict[int, str]:
        keys = {rank: self.name("answer", rank) for rank in range(1, dist.get_world_size())}
        awaited, looked, pauses = list(keys), time.monotonic(), _pause_longer()
        while not store.check([keys[rank] for rank in awaited]):
            if (now := time.monotonic()) > deadline:
                break
            if now - looked > _STUCK_SECONDS:
                awaited = [rank for rank in awaited if not store.check([self.name_end(rank)])]
                looked = now
            time.sleep(next(pauses))
        return {rank: self._read(store, rank, key) for rank, key in keys.items()}

    def _read(self, store: Any, rank: int, key: str) -> str:
        if store.check([key]):
            return str(store.get(key).decode())
        return "has ended" if store.check([self.name_end(rank)]) else "did not come"

    def _say_goodbye(self) -> None:
        if self.is_valid:
            self._ask(None)


class _Answering(_Roll):
    """Another rank's: a thread answers, and tells the main thread the verdict."""

    def __init__(self) -> None:
        super().__init__()
        self._store: Any = get_default_store()
        # A connection of its own: one that waits for a question lets nobody else ask.
        self._own: Any = self._store.clone()
        self._rank, self._main = dist.get_rank(), threading.main_thread().ident
        self._change = threading.Condition()
        self._here: str | None = None
        """The call that the main thread has come to."""
        self._verdict: list[str] | None = None
        self._missed: tuple[list[Any], list[str]] | None = None
        """The last question that rank 0 gave up, and the verdict."""
        self._thread = threading.Thread(target=self._answer, name="rapidformer-roll", daemon=True)
        self._thread.start()

    def call(self, call: str, patience: timedelta) -> list[str]:
        with self._change:
            missed, self._missed = self._missed, None
            if missed is not None and missed[0] == [call, _progress]:
                return missed[1]
            self._here, self._verdict = call, None
            self._change.notify_all()
            try:
                # Rank 0 answers within its own patience, once it has come.
                seconds = (self.patience + patience).total_seconds()
                self._change.wait_for(lambda: self._verdict is not None or self._is_over, seconds)
            finally:
                self._here = None
            if self._verdict is None:
                raise RapidformerError(
                    f"{call} was called on rank {self._rank}, and not on rank 0: call it there."
                )
            return self._verdict

    def _answer(self) -> None:
        with suppress(RuntimeError):  # rank 0 has ended, and its store with it
            while not self._is_over:
                key = self.name("question", self._rank)
                self._own.wait([key], _NEVER)
                if (question := json.loads(self._own.get(key))) is None:
                    break
                self._serve(*question)
                self._number += 1
        with self._change:
            self._is_over = True
            self._change.notify_all()

    def _serve(self, call: str, progress: int, entered: int) -> None:
        """Answer once it is known where this rank is, until rank 0 does not wait any longer."""
        answer: str | None = None
        place: tuple[str, int, int] | None = None
        since, pauses = time.monotonic(), _pause_longer()
        with self._change:
            while not self._own.check([self.name("verdict")]):
                if self._is_over:
                    return
                if answer is None:
                    now = _find_collective(self._main) if count_collectives() > entered else None
                    place, since = (place, since) if now == place else (now, time.monotonic())
                    is_stuck = time.monotonic() - since > _STUCK_SECONDS
                    answer = self._describe(call, progress, place[0] if place and is_stuck else "")
                    if answer is not None:
                        self._own.set(self.name("answer", self._rank), answer)
                        pauses = _pause_longer()
                self._change.wait(next(pauses))
            verdict = json.loads(self._own.get(self.name("verdict")))
            if answer in (None, _HERE) and self._here == call:
                self._here, self._verdict = None, verdict
                self._change.notify_all()
            elif answer is None:
                self._missed = [call, progress], verdict

    def _describe(self, call: str, progress: int, collective: str) -> str | None:
        """Where this rank is, if it is known whether it still comes."""
        if self._here is not None:
            return _HERE if self._here == call else f"waits in {self._here}"
        if _progress > progress:
            return "trains on"
        return f"waits in {collective}" if collective else None

    def _say_goodbye(self) -> None:
        self._store.set(self.name_end(self._rank), "1")
        self._store.set(self.name("question", self._rank), json.dumps(None))  # wakes the thread
        self._thread.join(_STUCK_SECONDS)


def _pause_longer() -> Iterator[float]:
    """Seconds between two looks at the store."""
    pause = 0.001
    while True:
        yield pause
        pause = min(2 * pause, _LOOK_SECONDS)


def _find_collective(thread: int | None) -> tuple[str, int, int] | None:
    """The function of torch.distributed in which a thread waits for all ranks, and its place."""
    innermost = frame = find_frame(thread or 0)
    if innermost is None or not _is_in(innermost, "torch", "distributed"):
        return None
    name, where = "a collective", ""
    while frame is not None:
        if _is_in(frame, "torch", "distributed"):
            own = frame.f_code.co_name
            if own in _BETWEEN_TWO or frame.f_locals.get("group") not in (None, dist.group.WORLD):
                return None
            name = name if own == _DECORATED or own.startswith("_") else f"{own}()"
        elif not any(_is_in(frame, package) for package in _ABOVE):
            where = f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
            break
        frame = frame.f_back
    return f"{name}{where}", id(innermost), innermost.f_lasti


def _is_in(frame: FrameType, package: str, *below: str) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(_FOLDERS[package].joinpath(*below))


_FOLDERS = {
    "torch": Path(torch.__file__).parent,
    "rapidformer": Path(__file__).parents[1],
}

_roll: _Roll | None = None
_started = 0
"""How many there have been: all ranks leave and join a process group together."""


def _get_roll() -> _Roll | None:
    """That of the process group, if it was started."""
    return _roll if _roll is not None and _roll.is_valid else None


def start_roll() -> None:
    """Let this process ask or answer; every rank calls this after it has joined the others."""
    global _roll
    if not is_alone() and _get_roll() is None:
        stop_roll()
        _roll = _Asking() if dist.get_rank() == 0 else _Answering()


def stop_roll() -> None:
    """Before the process group is left."""
    if _roll is not None:
        _roll.leave()
