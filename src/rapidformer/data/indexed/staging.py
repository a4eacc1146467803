"""Files that grow beside their target under another name, each written by one process alone.

What a reader would get wrong: the staging name is always the same, so that what a killed process
left behind is written over instead of filling the disk. A lock keeps two living ones apart; it
knows processes alone, so two writers inside one process are kept apart by a table.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

from rapidformer.data.indexed.layout import IndexedDataError

_BUFFER = 1 << 20
# Forgotten writers drop out; a forked worker finds none of its parent's, whose lock it lacks.
_open_here: WeakValueDictionary[tuple[int, int, int], BinaryIO] = WeakValueDictionary()


def get_staging(target: Path) -> Path:
    """Where a file is written before it has its name."""
    return target.with_name(f".{target.name}.part")


def open_staging(target: Path) -> BinaryIO:
    """An empty file that nobody else is writing."""
    path = get_staging(target)
    _check_not_open_here(path, target)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        file = os.fdopen(descriptor, "wb", buffering=_BUFFER)
        try:
            _lock(file, target)
            # Whoever held the lock may have given the file its final name meanwhile.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                file.truncate(0)
                _open_here[_get_key(path)] = file
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


def _check_not_open_here(path: Path, target: Path) -> None:
    # Before the file is opened: closing a second descriptor would end the first one's lock.
    file = _open_here.get(_get_key(path)) if path.exists() else None
    if file is not None and not file.closed:
        raise IndexedDataError(
            f"{target} is being written by this process already: finalize() or discard() the other "
            "writer first."
        )


def _get_key(path: Path) -> tuple[int, int, int]:
    place = path.stat()
    return os.getpid(), place.st_dev, place.st_ino


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
