"""A run that goes back (``--load RUN/iter_0000006 --save RUN``) leaves its later part behind.

Later checkpoints are moved to ``.abandoned/`` before the first new step, so that nothing resumes
from them, and deleted once the new branch has its first checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from rapidformer.checkpoint.finding import TRACKER, find_checkpoints, get_step
from rapidformer.checkpoint.publish import replace_text
from rapidformer.log import get_logger

ABANDONED = ".abandoned"


def abandon_later(folder: Path, step: int, results: Iterable[str] = ()) -> None:
    """Move checkpoints after this step aside, and with them the results of the run's end."""
    later = [path for path in find_checkpoints(folder) if get_step(path) > step]
    if later:
        replace_text(folder / TRACKER, str(step))
        abandon(folder, [*later, *(folder / name for name in results)])
        get_logger().info(
            f"going back to step {step}: {', '.join(path.name for path in later)} moved to "
            f"{folder / ABANDONED}, until this run has a checkpoint"
        )


def abandon(folder: Path, paths: Iterable[Path]) -> None:
    """Move some of a run's files aside."""
    (folder / ABANDONED).mkdir(exist_ok=True)
    for path in paths:
        target = folder / ABANDONED / path.name
        if path.exists():
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)


def drop_abandoned(folder: Path) -> None:
    """Delete what the run has left behind."""
    shutil.rmtree(folder / ABANDONED, ignore_errors=True)
