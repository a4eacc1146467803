"""Watch the ranks' heartbeats; when no rank makes progress, report which one is missing and where.

Each rank keeps one line in its own file, written by ``rapidformer.dist.heartbeat``: number of
beats, step, phase, time. Every rank beats equally often, so the rank with fewer beats is the one
the others wait for. A signal makes it print its stack, even if it hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rapidformer.launch.rendezvous import ALIVE_SECONDS, Rounds
from rapidformer.launch.worker import STACK_SIGNAL, get_rank_file
from rapidformer.run_events import append_event

_STACK_SECONDS = 5.0
_LINES = 40
_DULL = ("<frozen ", "rapidformer/cli/")


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Where a rank is, and since when."""

    rank: int
    node: int
    count: int
    step: int
    phase: str
    age: float
    """Seconds since it got there."""
    has_ended: bool = False
    suspended_pid: int | None = None
    """The process that somebody has suspended (SIGSTOP, Ctrl-Z)."""

    @property
    def position(self) -> tuple[int, int]:
        return self.step, self.count

    def describe(self) -> str:
        return f"step {self.step}, phase {self.phase}"


class Watch(threading.Thread):
    """Watches the ranks of this node; on node 0, the ranks of all nodes."""

    def __init__(
        self, folder: Path, rounds: Rounds, *, stall_seconds: float, say: Callable[[str], None]
    ) -> None:
        super().__init__(name="rapidformer-watch", daemon=True)
        self._folder, self._rounds, self._say = folder, rounds, say
        self._stall_seconds = stall_seconds
        self._pids: dict[int, int] = {}
        self._round = -1
        self._told: dict[int, tuple[int, int]] = {}
        """The ranks missing in the last report, and where each of them was."""
        self.stall = ""
        """The ranks missing in a stall that is still going on, as a short text."""
        self._answered = ""
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._store = rounds.open_client() if rounds.plan.nodes > 1 else None

    def begin_round(self, number: int, pids: dict[int, int]) -> None:
        with self._lock:
            self._round, self._pids, self._told, self.stall = number, pids, {}, ""

    def end_round(self) -> None:
        with self._lock:
            self._pids = {}

    def stop(self) -> None:
        self._is_stopping.set()
        self.join(timeout=5)

    def run(self) -> None:
        interval = min(ALIVE_SECONDS, self._stall_seconds / 4 or ALIVE_SECONDS)
        for beat in itertools.count(1):
            # The store is gone if node 0 is; that is reported elsewhere.
            with contextlib.suppress(RuntimeError):
                self._look(beat)
            if self._is_stopping.wait(interval):
                return

    def _look(self, beat: int) -> None:
        with self._lock:
            pids, number = dict(self._pids), self._round
        if number < 0:
            return  # not part of the run yet: another node may still take this number
        own = self._read_beats(pids)
        if self._store is not None:
            self._rounds.say_alive(self._store, beat)
            text = json.dumps([asdict(beat) for beat in own])
            self._store.set(f"beats/{number}/{self._rounds.plan.node_rank}", text)
            self._answer(pids)
        if self._rounds.plan.node_rank != 0 or not self._stall_seconds or not own:
            return
        keys = [f"beats/{number}/{node}" for node in range(1, self._rounds.plan.nodes)]
        store = self._store
        texts = [store.get(key) for key in keys if store is not None and store.check([key])]
        beats = own + [Beat(**values) for text in texts for values in json.loads(text)]
        missing = find_missing(beats)
        if not is_stalled(beats, self._stall_seconds):
            # The others may move (they give up and exit) while the rank they waited for does not.
            if not any(self._told.get(beat.rank) == beat.position for beat in beats):
                if self._told:
                    note_in_run(self._folder, "moved", text="The ranks move again.")
                self._told, self.stall = {}, ""
        elif (places := {beat.rank: beat.position for beat in missing}) != self._told:
            self._told = places
            self.stall = f"rank {missing[0].rank} was missing at {missing[0].describe()}"
            stacks = self._collect_stacks([beat.rank for beat in missing], pids)
            text = describe_stall(beats, missing, stacks, self._rounds.plan.nodes)
            self._say(text)
            note_in_run(self._folder, "stall", text=text)

    def _read_beats(self, pids: dict[int, int]) -> list[Beat]:
        node = self._rounds.plan.node_rank
        beats = (read_beat(self._folder, rank, node, pid) for rank, pid in pids.items())
        return [beat for beat in beats if beat is not None]

    def _collect_stacks(self, ranks: list[int], pids: dict[int, int]) -> dict[int, str]:
        stacks = self._dump_stacks(ranks, pids)
        elsewhere = [rank for rank in ranks if rank not in pids]
        if self._store is None or not elsewhere:
            return stacks
        name = f"{time.time()}"
        self._store.set("stacks/wanted", json.dumps({"name": name, "ranks": elsewhere}))
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline and not set(ranks) <= set(stacks):
            time.sleep(0.1)
            for node in range(1, self._rounds.plan.nodes):
                key = f"stacks/{name}/{node}"
                if self._store.check([key]):
                    answer: dict[str, str] = json.loads(self._store.get(key))
                    stacks |= {int(rank): text for rank, text in answer.items()}
        return stacks

    def _answer(self, pids: dict[int, int]) -> None:
        """Send node 0 the stacks it asks for."""
        assert self._store is not None
        if self._rounds.plan.node_rank == 0 or not self._store.check(["stacks/wanted"]):
            return
        wanted: dict[str, Any] = json.loads(self._store.get("stacks/wanted"))
        if wanted["name"] == self._answered:
            return
        self._answered = wanted["name"]
        stacks = self._dump_stacks(wanted["ranks"], pids)
        key = f"stacks/{self._answered}/{self._rounds.plan.node_rank}"
        self._store.set(key, json.dumps(stacks))

    def _dump_stacks(self, ranks: list[int], pids: dict[int, int]) -> dict[int, str]:
        here = [rank for rank in ranks if rank in pids]
        files = {rank: get_rank_file("stack", self._folder, rank) for rank in here}
        texts = {rank: dump_stack(file, pids[rank]) for rank, file in files.items()}
        return {rank: text for rank, text in texts.items() if text}


def note_in_run(scratch: Path, event: str, **facts: Any) -> None:
    """Add to the record of the run, if its first rank has said where that is."""
    with contextlib.suppress(OSError, ValueError):
        number, _, name = (scratch / "record").read_text(encoding="utf-8").partition(" ")
        if Path(name).stat().st_ino == int(number):
            append_event(Path(name).parent, event, **facts)


def read_beat(folder: Path, rank: int, node: int, pid: int) -> Beat | None:
    """A rank's line; None before the first one, or while it is being written."""
    for _ in range(3):
        try:
            words = get_rank_file("beat", folder, rank).read_text(encoding="ascii").split()
            count, step, phase, since, check = words[:5]
            if count == check:
                return Beat(
                    rank=rank, node=node, count=int(count), step=int(step), phase=phase,
                    age=max(time.monotonic() - float(since), 0.0),
                    has_ended=not Path(f"/proc/{pid}").exists(),
                    suspended_pid=pid if _is_suspended(pid) else None,
                )  # fmt: skip
        except (OSError, ValueError):
            pass
    return None


def _is_suspended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError):
        return False
    return state in "Tt"


def is_stalled(beats: Iterable[Beat], seconds: float) -> bool:
    """Whether no live rank has moved for this long."""
    beats = list(beats)
    waiting = [beat for beat in beats if not beat.has_ended]
    if not waiting or any(beat.age <= seconds for beat in waiting):
        return False
    # Before and after training, all ranks may be busy with their own work for a long time.
    is_outside = all(beat.phase in ("start", "end") for beat in beats)
    return not (is_outside and len({beat.position for beat in beats}) == 1)


def find_missing(beats: list[Beat]) -> list[Beat]:
    """The ranks that the others wait for: suspended ones, those behind, or all."""
    suspended = [beat for beat in beats if beat.suspended_pid is not None]
    furthest = max(beat.position for beat in beats)
    return suspended or [beat for beat in beats if beat.position < furthest] or beats


def describe_stall(
    beats: list[Beat], missing: list[Beat], stacks: dict[int, str], nodes: int
) -> str:
    """The report shown to the user."""
    seconds = min(beat.age for beat in beats if not beat.has_ended)
    lines = [f"stalled: no rank has moved for {seconds:.0f} s; still waiting"]
    if missing == beats and beats[0].suspended_pid is None:
        lines.append(
            f"  all {len(beats)} ranks are at {_join_places(beats)}: nobody is behind. They may "
            "wait in different collectives; their stacks tell."
        )
    else:
        for beat in missing:
            where = f" (node {beat.node})" if nodes > 1 else ""
            what = "has ended" if beat.has_ended else "is missing"
            if beat.suspended_pid is not None:
                what = f"is suspended (`kill -CONT {beat.suspended_pid}` wakes it)"
            lines.append(
                f"  rank {beat.rank}{where} {what}: {beat.describe()}, for {beat.age:.0f} s"
            )
        absent = {beat.rank for beat in missing}
        waiting = [beat for beat in beats if beat.rank not in absent]
        lines += [f"  waiting for it: {_join_places(waiting)}"] if waiting else []
    for rank, stack in sorted(stacks.items()):
        lines += [f"  stack of rank {rank}:", *(f"    {line}" for line in stack.splitlines())]
    return "\n".join(lines)


def _join_places(beats: list[Beat]) -> str:
    places: dict[str, list[int]] = {}
    for beat in beats:
        places.setdefault(beat.describe(), []).append(beat.rank)
    return "; ".join(
        f"{place} ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))})"
        for place, ranks in places.items()
    )


def dump_stack(path: Path, pid: int) -> str:
    """Ask a process on this node for its stack; it writes it to its file."""
    before = path.stat().st_size if path.exists() else 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    text, deadline = "", time.monotonic() + 2.0
    while time.monotonic() < deadline:
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            now = path.read_text(encoding="utf-8", errors="replace")[before:]
            if now and now == text:
                break  # no longer growing
            text = now
    return _shorten(text)


def _shorten(stack: str) -> str:
    """Drop the frames that every process shares."""
    lines = [line for line in stack.strip().splitlines() if not any(p in line for p in _DULL)]
    return "\n".join(lines[:_LINES] + ["  ..."] * (len(lines) > _LINES))
