"""Files that grow beside their target under another name, each written by one process alone.

What a reader would get wrong: the staging name is always the same, so that what a killed process
left behind is written over instead of filling the disk. A lock keeps two living ones apart.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import BinaryIO

from rapidformer.data.indexed.layout import IndexedDataError

_BUFFER = 1 << 20


def get_staging(target: Path) -> Path:
    """Where a file is written before it has its name."""
    return target.with_name(f".{target.name}.part")


def open_staging(target: Path) -> BinaryIO:
    """An empty file that no other process is writing."""
    path = get_staging(target)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        file = os.fdopen(descriptor, "wb", buffering=_BUFFER)
        try:
            _lock(file, target)
            # Whoever held the lock may have given the file its final name meanwhile.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                file.truncate(0)
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def force_folder(folder: Path) -> None:
    """Force the names in a folder to disk, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _lock(file: BinaryIO, target: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return
    try:
        # A record lock: it ends with this process, whatever its forked workers still hold open.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise IndexedDataError(
                f"another process is writing {target} at this moment: wait for it, or choose "
                "another name."
            ) from None
        # A file system without locks: the user keeps processes apart.
