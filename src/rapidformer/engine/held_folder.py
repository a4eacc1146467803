"""The folder that a run writes to.

Rank 0 has its lock; the other ranks only know that it is held.
"""

from __future__ import annotations

import functools
from pathlib import Path

from rapidformer.checkpoint.lock import FolderLock
from rapidformer.checkpoint.publish import remove_leftovers
from rapidformer.checkpoint.writing import run_on_first
from rapidformer.errors import CheckpointError


class HeldFolder:
    """At most one folder, held until it is released or another one is."""

    def __init__(self, *, is_main: bool) -> None:
        self.path: Path | None = None
        """None: no folder belongs to this run, or another run has taken it over."""
        self._is_main = is_main
        self.lock: FolderLock | None = None

    def hold(self, folder: Path) -> None:
        """Lock a folder; every rank must call this. One that another live run holds stops all."""
        is_new = self.path != folder
        if is_new:
            self.release()
            self.path, self.lock = folder, FolderLock(folder) if self._is_main else None
        action = functools.partial(_take_or_check, self.lock, is_new)
        try:
            run_on_first(action, folder, is_main=self._is_main)
        except CheckpointError:
            self.release()
            raise

    def release(self) -> None:
        """Let other runs write to the folder."""
        if self.lock is not None:
            self.lock.release()
        self.path = self.lock = None


def _take_or_check(lock: FolderLock | None, is_new: bool) -> None:
    assert lock is not None  # only rank 0 runs this
    if is_new:
        lock.acquire()
        remove_leftovers(lock.folder)
    else:
        lock.check()
