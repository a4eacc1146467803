"""Find out whether all ranks have come to a call that scripts also make on rank 0 alone.

``if rank == 0: engine.save_checkpoint(...)`` is a habit from DistributedDataParallel. The other
ranks are elsewhere by then, and the first collective would wait for them in vain. So rank 0 asks
before it enters one, through the store by which the ranks have found each other. On every other
rank a thread answers, which otherwise sleeps: this rank has come to the same call; or it cannot
come any more, because it trains on, has ended, or waits in a collective of all ranks that rank 0
has not entered. A rank that waits for another one than rank 0 may still come.
"""

from __future__ import annotations

import atexit
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

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
_HERE, _ENDED = "here", "has ended"
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
    roll = None if is_alone() or _is_together.get() else _get_roll()
    if roll is None:
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
    if is_alone() or _is_together.get():
        action()
        return
    number = _counts[call] = _counts.get(call, -1) + 1
    key, store = f"{_KEY}/done/{call}/{number}", get_default_store()
    if dist.get_rank() == 0:
        with apart():
            _post_outcome(action, key, store)
        return
    _wait_for(f"{key}/begun", store, call, _get_roll().patience)
    _wait_for(key, store, call, _NEVER)
    if (error := pickle.loads(store.get(key))) is not None:
        raise error


_counts: dict[str, int] = {}
"""How often each was called on this rank."""


def _post_outcome(action: Callable[[], None], key: str, store: Any) -> None:
    store.set(f"{key}/begun", "1")
    error: Exception | None = None
    try:
        action()
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
    deadline, pause = time.monotonic() + patience.total_seconds(), 0.001
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RapidformerError(
                f"{call} was called on rank {dist.get_rank()}, and not on rank 0: call it there."
            )
        time.sleep(pause)
        pause = min(2 * pause, _LOOK_SECONDS)


# ---- where the others are ----------------------------------------------------------------------


_progress = 0


def note_progress() -> None:
    """This rank has begun another micro-batch, as all ranks do equally often."""
    global _progress
    _progress += 1


class _Roll:
    """The questions of rank 0 and what becomes of them; each rank has one."""

    def __init__(self, patience: timedelta) -> None:
        self.patience = patience
        """As long as for a rank that is missing in a collective."""
        self._store: Any = get_default_store()
        self._number = 0
        """Of the next question."""

    def call(self, call: str, patience: timedelta) -> list[str]:
        """Where the ranks are that have not come to this call; every rank that has, calls this."""
        raise NotImplementedError

    def name(self, kind: str, rank: int | None = None) -> str:
        return "/".join([_KEY, str(self._number), kind, *([] if rank is None else [str(rank)])])


class _Asking(_Roll):
    """Rank 0's."""

    def call(self, call: str, patience: timedelta) -> list[str]:
        others, entered = range(1, dist.get_world_size()), count_collectives()
        for rank in others:
            question = json.dumps([call, _progress, entered])
            self._store.set(self.name("question", rank), question)
        answers = self._collect(others, time.monotonic() + patience.total_seconds())
        absent = [f"rank {rank} {text}" for rank, text in answers.items() if text != _HERE]
        self._store.set(self.name("verdict"), json.dumps(absent))
        self._number += 1
        return absent

    def _collect(self, others: range, deadline: float) -> dict[int, str]:
        keys = [self.name("answer", rank) for rank in others]
        pause, looked = 0.001, time.monotonic()
        while not self._store.check(keys) and (now := time.monotonic()) < deadline:
            if now - looked > _STUCK_SECONDS:
                looked = now
                self._answer_for_gone(others)
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS)
        return {rank: self._read(key) for rank, key in zip(others, keys, strict=True)}

    def _answer_for_gone(self, others: range) -> None:
        """Processes that have ended do not answer."""
        for rank in others:
            key = self.name("answer", rank)
            if self._store.check([f"{_KEY}/ended/{rank}"]) and not self._store.check([key]):
                self._store.set(key, _ENDED)

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else "did not come"


class _Answering(_Roll):
    """Another rank's: a thread answers, and tells the main thread the verdict."""

    def __init__(self, patience: timedelta) -> None:
        super().__init__(patience)
        # A connection of its own: one that waits for a question lets nobody else ask.
        self._own: Any = self._store.clone()
        self._rank, self._main = dist.get_rank(), threading.main_thread().ident
        self._change = threading.Condition()
        self._here: str | None = None
        """The call that the main thread has come to."""
        self._verdict: list[str] | None = None
        self._missed: tuple[list[Any], list[str]] | None = None
        """The last question that rank 0 gave up, and the verdict."""
        self._is_over = False
        self._thread = threading.Thread(target=self._answer, name="rapidformer-roll", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def call(self, call: str, patience: timedelta) -> list[str]:
        with self._change:
            if self._missed is not None and self._missed[0] == [call, _progress]:
                return self._missed[1]
            self._here, self._verdict = call, None
            self._change.notify_all()
            # Rank 0 answers within its own patience, once it has come.
            seconds = (self.patience + patience).total_seconds()
            self._change.wait_for(lambda: self._verdict is not None, seconds)
            self._here = None
            if self._verdict is None:
                raise RapidformerError(
                    f"{call} was called on rank {self._rank}, and not on rank 0: call it there."
                )
            return self._verdict

    def _answer(self) -> None:
        while (question := self._wait("question")) is not None and not self._is_over:
            call, progress, entered = json.loads(question)
            answer = self._find_answer(call, progress, entered)
            if answer is not None:
                self._own.set(self.name("answer", self._rank), answer)
            verdict = json.loads(self._wait("verdict") or "[]")
            with self._change:
                if answer == _HERE:
                    self._verdict = verdict
                elif answer is None:
                    self._missed = [call, progress], verdict
                self._change.notify_all()
            self._number += 1

    def _wait(self, kind: str) -> str | None:
        """What rank 0 writes; None if it has ended."""
        key = self.name(kind, self._rank if kind == "question" else None)
        try:
            self._own.wait([key], _NEVER)
            return str(self._own.get(key).decode())
        except RuntimeError:
            return None

    def _find_answer(self, call: str, progress: int, entered: int) -> str | None:
        """Where this rank is, once it is known; None if rank 0 does not wait any longer."""
        place, since = None, time.monotonic()
        with self._change:
            while not self._own.check([self.name("verdict")]):
                if self._is_over:
                    return _ENDED
                if self._here == call:
                    return _HERE
                if _progress > progress:
                    return "trains on"
                now = _find_collective(self._main) if count_collectives() > entered else None
                if now != place:
                    place, since = now, time.monotonic()
                elif place is not None and time.monotonic() - since > _STUCK_SECONDS:
                    return f"waits in {place[0]}"
                self._change.wait(_LOOK_SECONDS)
        return None

    def _leave(self) -> None:
        """At exit: rank 0 shall not wait, and the thread shall not outlive the interpreter."""
        self._is_over = True
        try:
            self._store.set(f"{_KEY}/ended/{self._rank}", "1")
            self._store.set(self.name("question", self._rank), '["", 0, 0]')
        except RuntimeError:  # rank 0 has ended, and its store with it
            return
        self._thread.join(_STUCK_SECONDS)


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

_rolls: WeakKeyDictionary[Any, _Roll] = WeakKeyDictionary()
"""By process group: one that was left takes its store with it."""


def _get_roll() -> _Roll:
    return _rolls[dist.group.WORLD]


def start_roll(timeout: timedelta) -> None:
    """Let this process ask or answer; every rank calls this after it has joined the others."""
    if not is_alone() and dist.group.WORLD not in _rolls:
        kind = _Asking if dist.get_rank() == 0 else _Answering
        _rolls[dist.group.WORLD] = kind(timeout)
