"""File locks, at which processes meet; the kernel releases them when their holder dies.

``indexed/writer.py`` takes a lock of another kind, which does not outlive its process in workers.
"""

from __future__ import annotations

import fcntl
from typing import IO, Any


def try_lock(file: IO[Any]) -> bool | None:
    """Lock a file until it is closed; False: it is taken. None: this file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
