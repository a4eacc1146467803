"""Find out whether all ranks have come to a call that scripts also make on rank 0 alone.

``if rank == 0: engine.save_checkpoint(...)`` is a habit from DistributedDataParallel. The other
ranks are elsewhere by then, and the first collective would wait for them in vain. So rank 0 notes
each such call, and how it ended, in the store by which the ranks have found each other; another
rank that comes to a call looks for it there. Only where one stays away does rank 0 ask where it is:
it cannot come any more if it trains on, has ended, or waits in another such call or in a collective
of all ranks that rank 0 has not entered. A rank that waits for another one than rank 0 may still
come. A thread answers for it, as a rank that waits in a collective cannot do so itself.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
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

_BRIEF_PATIENCE = 60.0
"""Seconds for a rank that shows no sign of being elsewhere, if rank 0 can do without it."""
_NEVER = timedelta(days=365)
_SHORT_PAUSE, _LONGEST_PAUSE = 0.01, 0.1
"""Rank 0 asks nobody as long as its pauses are short: ranks seldom come at the same moment."""
_STUCK_SECONDS = 1.0
"""From here on, a rank that is in a collective waits there."""
_HERE, _MISSING = "here", "did not come"
_END = "end"
"""Asks a rank's thread for nothing any more."""
_ABOVE = ("torch", "rapidformer")
"""Packages whose lines say nothing to the user about where a rank is."""
_DECORATED = "wrapper"
"""What torch calls the function around each collective."""
_BETWEEN_TWO = ("send", "recv", "batch_isend_irecv")

_is_together: ContextVar[bool] = ContextVar("is_together", default=False)


@contextmanager
def attending(call: str, *, needs_all: str | None, alone: str = "") -> Iterator[bool]:
    """Enter a call; yields whether this rank has to do anything in it.

    ``needs_all`` says why all ranks must take part: if one does not come, the others get an error.
    Otherwise rank 0 works alone, and ``alone`` says what is lost by that.
    """
    roll = _get_roll()
    if roll is None:
        yield True
        return
    places = roll.call(call, _BRIEF_PATIENCE if needs_all is None else roll.patience)
    absent = [f"rank {rank} {place}" for rank, place in places.items()]
    absent[3:] = [f"{len(absent) - 3} more"] if len(absent) > 3 else []
    if absent and needs_all is not None:
        raise RapidformerError(
            f"{call} was called on rank 0, and not on every rank ({', '.join(absent)}), but "
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
            warn_once(f"{call} was called on rank 0 alone ({', '.join(absent)}): {alone}")
        with apart():
            yield True
    else:
        yield False


def run_by_first(call: str, action: Callable[[], None]) -> None:
    """Do on rank 0 what needs no other one; those that come wait for it, and raise its error."""
    roll = _get_roll()
    if roll is None:
        action()
    elif dist.get_rank() > 0:
        if (theirs := roll.follow(call).error) is not None:
            raise theirs
    else:
        error: Exception | None = RapidformerError("rank 0 was interrupted")
        roll.note(call)
        try:
            with apart():
                action()
            error = None
        except Exception as reason:
            error = RapidformerError(f"rank 0 failed with {type(reason).__name__}: {reason}")
            error = reason if isinstance(reason, RapidformerError) else error
            raise
        finally:
            roll.note_end(_Outcome({}, error))


_progress = 0


def note_progress() -> None:
    """This rank has begun another micro-batch, as all ranks do equally often."""
    global _progress
    _progress += 1


class _Outcome(NamedTuple):
    """How a call of rank 0 has ended."""

    absent: dict[int, str]
    """Where the ranks are that have not come."""
    error: Exception | None = None


class _Roll:
    """The calls of rank 0, one after the other, in the store; each rank has one."""

    def __init__(self) -> None:
        global _started
        _started += 1
        # A store may outlive its process group, and serve the next one.
        self._prefix = f"rapidformer/attendance/{_started}"
        self._rank, self._others = dist.get_rank(), range(1, dist.get_world_size())
        self._number = 0
        """Of rank 0's next call."""
        self._kept = 0
        """Of the first call that is still in the store."""
        self._asked: Counter[int] = Counter()
        """How often each rank was asked where it is."""
        self._is_over = False
        self._process, self._group = os.getpid(), ref(dist.group.WORLD)
        store = get_default_store()
        self.patience = store.timeout.total_seconds()
        """As long as for a rank that is missing in a collective."""
        self._store: Any = None
        """Not kept on rank 0: a process group that is left takes it with it."""
        if self._rank > 0:
            self._store = store
            # With a connection of its own: one that waits lets nobody else ask.
            own, main = store.clone(), threading.main_thread().ident
            self._thread = threading.Thread(
                target=self._answer, args=(own, main), name="rapidformer-roll", daemon=True
            )
            self._thread.start()
        atexit.register(self.leave)

    @property
    def is_valid(self) -> bool:
        """Whether it is of the process group that there is now."""
        return dist.is_initialized() and self._group() is dist.group.WORLD

    def call(self, call: str, patience: float) -> dict[int, str]:
        """Where the ranks are that have not come to this call; every rank that has, calls this."""
        if self._rank > 0:
            return self.follow(call).absent
        self.note(call)
        absent = {0: "was interrupted"}
        try:
            absent = self._await_others(patience)
        finally:
            self.note_end(_Outcome(absent))
        return absent

    def leave(self) -> None:
        """Before the process group is left: nobody shall wait for this rank."""
        atexit.unregister(self.leave)
        # A forked process shares the connection to the store, and must not use it.
        if self._is_over or self._process != os.getpid():
            return
        self._is_over = True
        with suppress(RuntimeError):  # the store is gone
            if self._store is not None:
                self._store.set(self._name("ended", self._rank), "")
                question = self._name("question", self._rank, self._asked[self._rank])
                self._store.set(question, _END)
                self._thread.join(_STUCK_SECONDS)
            elif self.is_valid:
                get_default_store().set(self._name("call", self._number), json.dumps(None))
                for rank in self._others:
                    self._ask(rank, _END)

    def _name(self, *parts: str | int) -> str:
        return "/".join([self._prefix, *map(str, parts)])

    # ---- rank 0 --------------------------------------------------------------------------------

    def note(self, call: str) -> None:
        """Rank 0 has come to a call."""
        get_default_store().set(self._name("call", self._number), json.dumps([call, _progress]))

    def note_end(self, outcome: _Outcome) -> None:
        """The call is over, or it is known who takes part in it."""
        get_default_store().set(self._name("end", self._number), pickle.dumps(outcome))
        self._number += 1

    def _await_others(self, patience: float) -> dict[int, str]:
        store, entered = get_default_store(), count_collectives()
        deadline = time.monotonic() + patience
        keys = {rank: self._name("came", self._number, rank) for rank in self._others}
        elsewhere: dict[int, str] = {}
        seen: dict[int, tuple[Any, float]] = {}
        for pause in _pause_longer():
            awaited = {rank: key for rank, key in keys.items() if rank not in elsewhere}
            if not awaited or store.check(list(awaited.values())) or time.monotonic() > deadline:
                break
            for rank, key in awaited.items() if pause > _SHORT_PAUSE else ():
                if not store.check([key]) and (place := self._find_place(rank, seen, entered)):
                    elsewhere[rank] = place
            time.sleep(pause)
        answers = {
            rank: store.get(key).decode() if store.check([key]) else elsewhere.get(rank, _MISSING)
            for rank, key in keys.items()
        }
        if store.check(list(keys.values())):
            self._forget_earlier()
        return {rank: place for rank, place in answers.items() if place != _HERE}

    def _forget_earlier(self) -> None:
        """Every rank has come to this call, and has read what there was before it."""
        store = get_default_store()
        for number in range(self._kept, self._number):
            came = (self._name("came", number, rank) for rank in self._others)
            for key in (self._name("call", number), self._name("end", number), *came):
                store.delete_key(key)
        self._kept = self._number

    def _find_place(
        self, rank: int, seen: dict[int, tuple[Any, float]], entered: list[int]
    ) -> str | None:
        """Where a rank is, if it cannot come any more."""
        store, answer = get_default_store(), self._name("answer", rank, self._asked[rank])
        if store.check([self._name("ended", rank)]):
            return "has ended"
        if rank not in seen:
            seen[rank] = None, time.monotonic()
            store.delete_key(answer)  # to what was asked in an earlier call
            self._ask(rank)
        elif store.check([answer]):
            progress, *state = json.loads(store.get(answer))
            store.delete_key(answer)
            if progress > _progress:
                return "trains on"
            if seen[rank][0] != state:
                seen[rank] = state, time.monotonic()
            place, counts = state
            is_beyond = any(theirs > own for theirs, own in zip(counts, entered, strict=True))
            if place and is_beyond and time.monotonic() - seen[rank][1] > _STUCK_SECONDS:
                return f"waits in {place[0]}"
            self._ask(rank)
        return None

    def _ask(self, rank: int, question: str = "where") -> None:
        self._asked[rank] += 1
        get_default_store().set(self._name("question", rank, self._asked[rank]), question)

    # ---- the other ranks -----------------------------------------------------------------------

    def follow(self, call: str) -> _Outcome:
        """Come to a call; returns how rank 0's ended once it has."""
        store: Any = self._store
        while True:
            key, end = self._name("call", self._number), self._name("end", self._number)
            note = json.loads(store.get(key)) if _wait_for(key, store, self.patience) else None
            if note is None:
                raise RapidformerError(
                    f"{call} was called on rank {self._rank}, and not on rank 0: call it there."
                )
            is_same, is_over = note[0] == call, store.check([end])
            if not is_over:
                came = self._name("came", self._number, self._rank)
                store.set(came, _HERE if is_same else f"waits in {call}")
                _wait_for(end, store, _NEVER.total_seconds())
            outcome: _Outcome = pickle.loads(store.get(end))
            self._number += 1
            is_earlier = is_over and note[1] < _progress
            is_known = outcome.absent.get(self._rank, _MISSING) != _MISSING
            if is_same and not is_earlier and not is_known:
                return outcome

    def _answer(self, store: Any, main: int) -> None:
        """What the thread does: say where the main one is whenever rank 0 asks."""
        with suppress(RuntimeError):  # rank 0 has ended, and its store with it
            while True:
                self._asked[self._rank] += 1
                question = self._name("question", self._rank, self._asked[self._rank])
                if not self._is_over:
                    store.wait([question], _NEVER)
                if self._is_over or store.get(question).decode() == _END:
                    return
                store.delete_key(question)
                state = _progress, _find_collective(main), count_collectives()
                store.set(question.replace("question", "answer"), json.dumps(state))


def _wait_for(key: str, store: Any, seconds: float) -> bool:
    """Whether it is there by then."""
    # Not the store's own waiting, which Ctrl-C does not end, and which keeps other threads out.
    deadline, pauses = time.monotonic() + seconds, _pause_longer()
    while not (is_there := store.check([key])) and time.monotonic() < deadline:
        time.sleep(next(pauses))
    return bool(is_there)


def _pause_longer() -> Iterator[float]:
    """Seconds between two looks at the store."""
    pause = 0.001
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


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
    """That of the process group, if it was started and there is something to find out."""
    is_clear = is_alone() or _is_together.get()
    return None if is_clear or _roll is None or not _roll.is_valid else _roll


def start_roll() -> None:
    """Let this process ask or answer; every rank calls this after it has joined the others."""
    global _roll
    if not is_alone() and (_roll is None or not _roll.is_valid):
        stop_roll()
        _roll = _Roll()


def stop_roll() -> None:
    """Before the process group is left."""
    if _roll is not None:
        _roll.leave()
