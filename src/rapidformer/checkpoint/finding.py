"""What is in a run's folder: its checkpoints by their names, and the names of everything else.

Imports no torch: the launcher and `rapidformer runs` look for checkpoints too, and answer at once.

A run that goes back (``--load RUN/iter_0000006 --save RUN``) leaves its later part behind: later
checkpoints are moved to ``.abandoned/`` before the first new step, so that nothing resumes from
them, and deleted once the new branch has its first checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from rapidformer.checkpoint.publish import replace_text
from rapidformer.checkpoint.run_file import RUN
from rapidformer.log import get_logger

TRACKER = "latest_checkpointed_iteration.txt"
METRICS_FILE = "metrics.jsonl"
RUN_FILE = ".run.json"
"""What the run writes, and the step of its best model."""
PREVIOUS = "previous"
"""An earlier run, kept by front ends that train into the same folder again."""
REPLACED = ".replaced"
"""A whole earlier run, until the new one has a checkpoint."""
ABANDONED = ".abandoned"


def find_checkpoints(folder: Path) -> list[Path]:
    """The published checkpoints of a run, oldest first."""
    named = (path for path in folder.glob("iter_*") if path.is_dir() and is_named(path))
    return sorted(named, key=get_step)


def is_named(folder: Path) -> bool:
    """Whether a folder's name is that of a checkpoint."""
    return folder.name.startswith("iter_") and _is_number(folder.name[5:])


def _is_number(text: str) -> bool:
    """Whether the text is a step; Python converts neither `²` nor thousands of digits."""
    return text.isascii() and text.isdecimal() and len(text) < 20


def get_step(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(checkpoint.name[5:])


def find_checkpoint(source: Path) -> Path | None:
    """A checkpoint's own folder, or the newest of a run's; None if there is none."""
    if (source / RUN).is_file() and (source / "state").is_dir():
        return source
    tracker = source / TRACKER
    if tracker.is_file():
        # Another trainer may have written `release` there, and a crash anything.
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        named = source / f"iter_{int(text) if _is_number(text) else 0:07d}"
        if named.is_dir():
            return named
    return next(reversed(find_checkpoints(source)), None)


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


def set_checkpoints_aside(folder: Path) -> None:
    """Move an earlier run's checkpoints to a folder of their own, where they can be resumed."""
    checkpoints = find_checkpoints(folder)
    if not checkpoints:
        return
    names = (f"{PREVIOUS}-{number}" if number > 1 else PREVIOUS for number in count(1))
    target = next(folder / name for name in names if not (folder / name).exists())
    target.mkdir()
    for path in (*checkpoints, folder / TRACKER):
        if path.exists():
            path.rename(target / path.name)
    get_logger().warning(
        f"{folder} held checkpoints of a run that this one does not continue "
        f"({', '.join(path.name for path in checkpoints)}): moved to {target}. To continue such a "
        "run, call engine.load_checkpoint(folder) after compose()."
    )


def drop_abandoned(folder: Path) -> None:
    """Delete what the run has left behind."""
    shutil.rmtree(folder / ABANDONED, ignore_errors=True)
