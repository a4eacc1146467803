"""Find the checkpoints of a run by their folders' names.

Imports no torch: the launcher and `rapidformer runs` look for checkpoints too, and answer at once.
"""

from __future__ import annotations

from pathlib import Path

from rapidformer.checkpoint.run_file import RUN

TRACKER = "latest_checkpointed_iteration.txt"


def find_checkpoints(folder: Path) -> list[Path]:
    """The published checkpoints of a run, oldest first."""
    found = (path for path in folder.glob("iter_*") if path.is_dir() and is_named(path))
    return sorted(found, key=get_step)


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
    found = find_checkpoints(source)
    return found[-1] if found else None
