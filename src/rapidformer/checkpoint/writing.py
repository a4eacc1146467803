"""Write to a run's folder: what goes wrong is said in one sentence, and stops all ranks."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from rapidformer.dist.collectives import broadcast_object, is_alone
from rapidformer.errors import RapidformerError, WriteError
from rapidformer.log import get_logger

T = TypeVar("T")


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Report an error of the file system as the user's to fix; what was written before stays."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise  # another rank is gone
    except (OSError, SafetensorError) as reason:
        raise WriteError(str(target), _describe(reason, target)) from None


def _describe(reason: Exception, target: Path) -> str:
    if not isinstance(reason, OSError):
        # safetensors' text ends with the system's own: "... No space left on device (os error 28)".
        return str(reason).rpartition("I/O error: ")[2]
    text = reason.strerror or str(reason)
    if reason.errno == errno.ENOSPC:
        folder = next((path for path in [target, *target.parents] if path.is_dir()), Path())
        disk = os.statvfs(folder)
        # Some file systems have no fixed number of inodes, and report 0 of 0.
        if disk.f_files > 0 and disk.f_favail == 0:
            return f"{text} (the disk has room, but no inodes for further files)"
    if reason.errno == errno.ENOENT:
        return f"{text} (the folder has vanished: {reason.filename})"
    return text


def run_on_first(action: Callable[[], T], folder: Path) -> T:
    """What the action returns on rank 0; every rank must call this, and raises its error."""
    outcome: tuple[Any, RapidformerError | None] = None, None
    if is_alone() or dist.get_rank() == 0:
        try:
            with writing(folder):
                outcome = action(), None
        except RapidformerError as error:
            outcome = None, error
    result, problem = broadcast_object(outcome)
    if problem is not None:
        raise problem
    return result


def warn_if_full(folder: Path, needed: int) -> None:
    """Warn if there is no room for a checkpoint of this many bytes."""
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < needed:
            get_logger().warning(
                f"{folder} has {free / 2**30:.2f} GiB left, and the next checkpoint needs about "
                f"{needed / 2**30:.2f} GiB: free some space, or keep fewer checkpoints with "
                "--save-total-limit."
            )
