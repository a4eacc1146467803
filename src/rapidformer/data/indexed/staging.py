"""Files that are written next to their target under a temporary name, each by a single process.

The temporary name is always the same, so leftovers of a killed process are overwritten instead of
filling the disk. A lock keeps two live processes apart. It works per process, so a table keeps two
writers within one process apart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

from rapidformer.data.indexed.layout import IndexedDataError

_BUFFER = 1 << 20
# Dropped writers disappear; a forked worker sees none of its parent's, since it lacks the lock.
_open_here: WeakValueDictionary[tuple[int, int, int], BinaryIO] = WeakValueDictionary()


def get_staging(target: Path) -> Path:
    """Where a file is written before it gets its final name."""
    return target.with_name(f".{target.name}.part")


def open_staging(target: Path) -> BinaryIO:
    """An empty file that nobody else is writing."""
    path = get_staging(target)
    # Before opening the file: closing a second descriptor would release the first one's lock.
    other = _open_here.get(_get_key(path)) if path.exists() else None
    if other is not None and not other.closed:
        raise IndexedDataError(
            f"{target} is being written by this process already: finalize() or discard() the other "
            "writer first."
        )
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        file = os.fdopen(descriptor, "wb", buffering=_BUFFER)
        try:
            _lock(file, target)
            # Whoever held the lock may have renamed the file meanwhile.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                file.truncate(0)
                _open_here[_get_key(path)] = file
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def force_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, if the system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _get_key(path: Path) -> tuple[int, int, int]:
    place = path.stat()
    return os.getpid(), place.st_dev, place.st_ino


def _lock(file: BinaryIO, target: Path) -> None:
    try:
        # A record lock ends with this process, whatever its forked workers still hold open.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise IndexedDataError(
                f"another process is writing {target}: wait for it, or choose another name."
            ) from None
        # A file system without locks: the user has to keep processes apart.
