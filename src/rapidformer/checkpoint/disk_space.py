"""Say that a disk will not hold the next checkpoint, before it is full."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from rapidformer.log import get_logger


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
