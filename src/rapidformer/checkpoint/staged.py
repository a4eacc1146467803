"""Write a folder that no run's lock covers: two exports into one place must not mix.

The second is refused while the first is alive. Each writes to a folder of its own, so that even
one whose lock was taken from it (it was suspended, say) publishes nothing of the other's.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rapidformer.checkpoint.lock import LOCK_FILE, FolderLock
from rapidformer.checkpoint.publish import get_staging, publish
from rapidformer.errors import CheckpointError


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new folder to write to; it becomes ``target`` if the block ends without an error."""
    home = get_staging(target)
    lock = FolderLock(home, target)
    lock.acquire()
    staging = home / uuid.uuid4().hex
    try:
        for left in home.iterdir():
            if not left.name.startswith(LOCK_FILE):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        staging.mkdir()
        yield staging
        lock.check()
        written = staging.stat().st_ino
        publish(target, staging=staging, with_manifest=False)
        if target.stat().st_ino != written:
            raise CheckpointError(
                f"{target} is not what was written: another program has replaced it. Export again."
            )
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        lock.release()
        with suppress(OSError):  # another process may be about to use it
            home.rmdir()
