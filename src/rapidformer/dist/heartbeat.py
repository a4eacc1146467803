"""Report this process's step and phase to the launcher, in a memory-mapped file.

A beat takes a few microseconds, and half of one without our launcher: then it only adds up the time
of the phases. Every rank must beat equally often, because the launcher takes the rank with fewer
beats for the missing one. So place beats where all ranks pass, never inside a condition on the
rank.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = "RAPIDFORMER_HEARTBEATS"
_SIZE = 128


@dataclass
class _Heartbeat:
    page: mmap.mmap | None = None
    saving: Path | None = None
    """Exists while a signal makes this process save."""
    count: int = 0
    step: int = 0
    phase: str = "start"
    since: float = field(default_factory=time.monotonic)
    """When the phase began, or its time was taken last."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""


_own = _Heartbeat()


def start_heartbeat(rank: int) -> None:
    """Open the file that the launcher created; does nothing under other launchers."""
    folder = os.environ.get(_VARIABLE)
    if folder is None or _own.page is not None:
        return
    path = Path(folder) / f"beat_{rank}"
    if path.is_file() and path.stat().st_size == _SIZE:
        with path.open("r+b") as file:
            _own.page = mmap.mmap(file.fileno(), _SIZE)
        _own.saving = Path(folder) / f"saving_{rank}"


def beat(phase: str, step: int | None = None) -> None:
    """Report that this process has entered a phase (of the current update)."""
    page, now = _own.page, _own_time()
    _own.phase = phase
    if page is None:
        return
    _own.count += 1
    if step is not None:
        _own.step = step
    # The count is at both ends, so that a reader can detect a concurrent write.
    line = f"{_own.count} {_own.step} {phase} {now:.3f} {_own.count}"
    page[:-1] = line.ljust(_SIZE - 1).encode("ascii")


def _own_time() -> float:
    """Now; the time until now belongs to the phase that is ending."""
    now = time.monotonic()
    _own.seconds[_own.phase] = _own.seconds.get(_own.phase, 0.0) + now - _own.since
    _own.since = now
    return now


def take_phases() -> dict[str, float]:
    """Seconds that this process was in each phase since the last call, by its own clock.

    A GPU works behind it: its time shows in the phase in which the process waits for it.
    """
    _own_time()
    seconds, _own.seconds = _own.seconds, {}
    return seconds


def announce_record(file: Path) -> None:
    """Tell the launcher where this run keeps its record.

    With the file's number: the folder may be given back to the run that this one was to replace.
    """
    if _VARIABLE in os.environ:
        text = f"{file.stat().st_ino} {file.resolve()}"
        (Path(os.environ[_VARIABLE]) / "record").write_text(text, encoding="utf-8")


def announce_saving(*, is_ready: bool) -> None:
    """Tell the launcher whether a signal makes this process save; otherwise it ends it at once."""
    if _own.saving is None:
        return
    if is_ready:
        _own.saving.touch()
    else:
        _own.saving.unlink(missing_ok=True)


@contextmanager
def in_phase(phase: str) -> Iterator[None]:
    """Enter a phase for a while, then return to the previous one."""
    before = _own.phase
    beat(phase)
    try:
        yield
    finally:
        beat(before)
