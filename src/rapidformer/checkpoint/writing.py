"""Say in one sentence why something could not be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rapidformer.errors import WriteError


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Report an error of the file system as the user's to fix; what was written before stays."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise  # another rank is gone
    except OSError as reason:
        raise WriteError(str(target), _describe(reason, target)) from None
    except SafetensorError as reason:
        # Its text ends with the system's own: "... No space left on device (os error 28)".
        raise WriteError(str(target), str(reason).rpartition("I/O error: ")[2]) from None


def _describe(reason: OSError, target: Path) -> str:
    text = reason.strerror or str(reason)
    if reason.errno == errno.ENOSPC and _has_no_inodes(target):
        return f"{text} (the disk has room, but no inodes for further files)"
    if reason.errno == errno.ENOENT:
        return f"{text} (the folder has vanished: {reason.filename})"
    return text


def _has_no_inodes(target: Path) -> bool:
    folder = next((path for path in [target, *target.parents] if path.is_dir()), Path())
    found = os.statvfs(folder)
    # Some file systems have no fixed number of inodes, and report 0 of 0.
    return found.f_files > 0 and found.f_favail == 0
