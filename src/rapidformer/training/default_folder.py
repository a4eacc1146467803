"""Every run has a folder: without ``--save`` it is ``runs/<task>-<model>-<date>``.

Rank 0 chooses it for all ranks. A run that the launcher restarts finds the folder that its first
attempt claimed; a resumed run continues in its old folder.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rapidformer.checkpoint.finding import RUN_FILE, find_checkpoint
from rapidformer.checkpoint.restart import (
    OWNER_FILE,
    claim_folder,
    continue_after_restart,
    find_claimed_folder,
)
from rapidformer.checkpoint.writing import writing
from rapidformer.config import Settings
from rapidformer.errors import CheckpointError
from rapidformer.training.run_folder import BEST, LAST

# Where runs without --save are kept (default: a folder named runs in the current folder).
RUNS_VARIABLE = "RAPIDFORMER_RUNS"
_SOURCE = "derived: every run has a folder"


def choose_folder(args: Settings) -> Settings:
    """The settings with a folder in ``save``; only for rank 0, since it creates one."""
    resumed = _find_resumed_run(args)
    if resumed is not None:
        return args.replace(_SOURCE, save=str(resumed))
    root = Path(os.environ.get(RUNS_VARIABLE) or "runs").expanduser()
    claimed = find_claimed_folder(root)
    if claimed is not None:
        return continue_after_restart(args.replace(_SOURCE, save=str(claimed)))
    folder = _make_folder(root, "-".join([*_describe_run(args), time.strftime("%Y%m%d-%H%M%S")]))
    with writing(folder):
        claim_folder(folder)
    return args.replace(_SOURCE, save=str(folder))


@contextmanager
def dropped_if_unused(folder: str | None) -> Iterator[None]:
    """Remove the new folder of a run that failed before it wrote anything."""
    path = Path(folder or "")
    # A default folder exists by now, and its parent is ours; that of --save may be the user's.
    is_parent_ours = path.exists() or not path.parent.exists()
    try:
        yield
    except BaseException:
        if folder is not None:
            with suppress(OSError):  # it is not empty, or was never created
                for name in (OWNER_FILE, RUN_FILE):
                    if {child.name for child in path.iterdir()} <= {OWNER_FILE, RUN_FILE}:
                        (path / name).unlink(missing_ok=True)
                path.rmdir()
                if is_parent_ours:
                    path.parent.rmdir()
        raise


def _find_resumed_run(args: Settings) -> Path | None:
    """The run that ``--load`` resumes, whose folder is kept."""
    if args.load is None or args.finetune:
        return None
    source = Path(args.load).expanduser()
    checkpoint = find_checkpoint(source) if source.is_dir() else None
    return checkpoint.parent if checkpoint is not None else None


def _make_folder(root: Path, name: str) -> Path:
    for number in range(1, 1000):
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as reason:
            raise CheckpointError(
                f"the run's folder {folder} cannot be created ({reason.strerror}): choose one "
                "with --save FOLDER."
            ) from None
        return folder
    raise CheckpointError(f"{root} already has 999 runs named {name}: choose a folder with --save.")


def _describe_run(args: Settings) -> list[str]:
    script = args.user_script or sys.argv[0]
    is_black_box = args.task is not None and args.user_script is None
    task = args.task if is_black_box else Path(script).stem
    return [_clean(part) for part in (task, _get_model_name(args)) if part]


def _get_model_name(args: Settings) -> str | None:
    named = args.pretrained_model_name_or_path or args.load
    if named is None:
        return args.model_type
    path = Path(named)
    # `best` and `last` say nothing about the model.
    return _read_model_type(path) if path.name in (BEST, LAST) else path.name


def _read_model_type(folder: Path) -> str | None:
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(kind)


def _clean(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
