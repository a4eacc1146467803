"""A run that is started again continues from its own last checkpoint.

``--resume auto`` asks for it. A restart by the launcher does it without asking, but only from a
checkpoint of its own: the folder may hold another run's, which the first attempt was about to
refuse. So a run leaves its name in the folder once it may write there, and only finding that name
makes the next attempt continue.
"""

from __future__ import annotations

import os
from pathlib import Path

from rapidformer.checkpoint.finding import find_checkpoint
from rapidformer.checkpoint.publish import replace_text
from rapidformer.config import Settings

OWNER_FILE = ".launch"


def claim_folder(folder: Path) -> None:
    """Leave the name of this launch in the folder; without a launcher there is none."""
    name = get_launch_name()
    if name is not None and _read_owner(folder) != name:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / OWNER_FILE, name)


def continue_after_restart(args: Settings) -> Settings:
    """The settings for another attempt: load what was saved, or start over if there is nothing."""
    if args.save is None:
        return args
    folder, source = Path(args.save), "derived: --resume auto"
    if args.resume != "auto":
        name, source = get_launch_name(), "restart"
        if not is_restart() or name is None or _read_owner(folder) != name:
            return args
    if find_checkpoint(folder):
        return args.replace(source, load=args.save, finetune=False, overwrite=False)
    return args.replace(source, overwrite=True)


def find_claimed_folder(root: Path) -> Path | None:
    """The folder under ``root`` that an earlier attempt of this launch claimed."""
    name = get_launch_name()
    if name is None or not is_restart() or not root.is_dir():
        return None
    return next((folder for folder in root.iterdir() if _read_owner(folder) == name), None)


def is_restart() -> bool:
    """Whether the launcher has started this run before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def get_launch_name() -> str | None:
    """The launcher's name for this run and its restarts; None if it has none of its own."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return name if name not in ("", "none") else None  # "none" is torchrun's for any run


def _read_owner(folder: Path) -> str | None:
    path = folder / OWNER_FILE
    try:
        return path.read_text(encoding="utf-8").strip() if path.is_file() else None
    except (OSError, ValueError):
        return None
