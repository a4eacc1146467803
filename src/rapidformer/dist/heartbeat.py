"""Where this process is in the run, for the launcher to see: step and phase, in a shared file.

A beat costs a few microseconds (bytes into a mapped page) and nothing at all without our
launcher. Every rank must beat equally often, since the launcher takes the one with fewer beats for
the one that is missing: so beats stand where all ranks come by, never inside a condition on rank.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "RAPIDFORMER_HEARTBEATS"
_SIZE = 128


class _Heartbeat:
    def __init__(self) -> None:
        self.page: mmap.mmap | None = None
        self.count = 0
        self.step = 0
        self.phase = "start"


_own = _Heartbeat()


def start_heartbeat(rank: int) -> None:
    """Take over the file that the launcher's bootstrap has made; nothing under other launchers."""
    folder = os.environ.get(_VARIABLE)
    if folder is None or _own.page is not None:
        return
    path = Path(folder) / f"beat_{rank}"
    if path.is_file() and path.stat().st_size == _SIZE:
        with path.open("r+b") as file:
            _own.page = mmap.mmap(file.fileno(), _SIZE)


def beat(phase: str, step: int | None = None) -> None:
    """Say that this process has come to a phase (of the update in progress)."""
    page = _own.page
    if page is None:
        return
    _own.count += 1
    _own.phase = phase
    if step is not None:
        _own.step = step
    # The count stands at both ends, so that a reader sees when it came in between.
    line = f"{_own.count} {_own.step} {phase} {time.monotonic():.3f} {_own.count}"
    page[:-1] = line.ljust(_SIZE - 1).encode("ascii")


@contextmanager
def in_phase(phase: str) -> Iterator[None]:
    """Be in a phase for a while, and then in the earlier one again."""
    before = _own.phase
    beat(phase)
    try:
        yield
    finally:
        beat(before)
