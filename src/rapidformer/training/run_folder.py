"""The folder of a run: where it is, who may write to it, and what happens to an earlier run.

Without ``--save`` it is ``runs/<task>-<model>-<date>``. A run that the launcher restarts finds the
folder that its first attempt claimed; a resumed run continues in its old folder.

A run lists what it writes in ``.run.json``. Only that is ever moved or deleted. A run that is
replaced is moved aside first, and deleted once the new run has its first checkpoint; if the new run
ends or is killed before that, the old one is moved back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rapidformer.checkpoint.finding import (
    ABANDONED,
    ARGUMENTS_FILE,
    METRICS_FILE,
    OWNER_FILE,
    PREVIOUS,
    REPLACED,
    RUN_FILE,
    TRACKER,
    TRACKERS_FOLDER,
    abandon,
    claim_folder,
    continue_after_restart,
    find_checkpoint,
    find_checkpoints,
    find_claimed_folder,
)
from rapidformer.checkpoint.publish import MANIFEST, read_json, replace_text
from rapidformer.checkpoint.writing import run_on_first, writing
from rapidformer.config import Settings
from rapidformer.errors import CheckpointError
from rapidformer.log import get_logger
from rapidformer.report import PAGE_FILE
from rapidformer.run_events import EVENTS_FILE

BEST = "best"
LAST = "last"
PLAN_FILE = "plan.json"
REFERENCE = "reference"
"""The folder with what a run keeps of the model that it started from."""
# Where runs without --save are kept (default: a folder named runs in the current folder).
RUNS_VARIABLE = "RAPIDFORMER_RUNS"
_SOURCE = "derived: every run has a folder"

_NAMES = (
    METRICS_FILE, TRACKER, ARGUMENTS_FILE, BEST, LAST, "tensorboard", TRACKERS_FOLDER, REFERENCE,
    ABANDONED, PLAN_FILE, EVENTS_FILE, PAGE_FILE,
)  # fmt: skip
# A run only adds files to the folders of trackers; it would overwrite these.
_OVERWRITTEN = (METRICS_FILE, ARGUMENTS_FILE, PLAN_FILE, BEST, LAST, REFERENCE, EVENTS_FILE)
_MOVING = ".replaced-partly"
"""An earlier run of which some parts may still, or again, be in the folder itself."""
_DELETED = ".replaced-deleted"


def choose_folder(args: Settings) -> Settings:
    """The settings with a folder in ``save``; only for rank 0, since it creates one."""
    source = Path(args.load or "").expanduser()
    resumes = args.load is not None and not args.finetune and source.is_dir()
    resumed = find_checkpoint(source) if resumes else None
    if resumed is not None:
        return args.replace(_SOURCE, save=str(resumed.parent))  # its run's folder is kept
    root = Path(os.environ.get(RUNS_VARIABLE) or "runs").expanduser()
    claimed = find_claimed_folder(root)
    if claimed is not None:
        return continue_after_restart(args.replace(_SOURCE, save=str(claimed)))
    is_black_box = args.task is not None and args.user_script is None
    task = args.task if is_black_box else Path(args.user_script or sys.argv[0]).stem
    words = [word for word in (task, _get_model_name(args)) if word]
    parts = [re.sub(r"[^\w.-]+", "-", word).strip("-.") or "run" for word in words]
    folder = _make_folder(root, "-".join([*parts, time.strftime("%Y%m%d-%H%M%S")]))
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


def _get_model_name(args: Settings) -> str | None:
    named = args.pretrained_model_name_or_path or args.load
    if named is None:
        return args.model_type
    path = Path(named)
    if path.name not in (BEST, LAST):  # which say nothing about the model
        return path.name
    try:
        return str(json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def begin_run(folder: Path, *, source: Path | None, continues: bool, overwrite: bool) -> None:
    """Make the folder this run's own, or refuse it; only for rank 0, which holds the lock."""
    check_run_folder(folder, source=source, continues=continues, overwrite=overwrite)
    is_resumed = continues and _is_within(source, folder)
    if not is_resumed and _has_results(folder):
        _move_aside(folder)
    if not (folder / RUN_FILE).is_file():
        ours = [name for name in _NAMES if is_resumed or not (folder / name).exists()]
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / RUN_FILE, json.dumps({"wrote": ours}))
    claim_folder(folder)


def check_run_folder(
    folder: Path, *, source: Path | None, continues: bool, overwrite: bool
) -> None:
    """Refuse to overwrite another run, or files that no run wrote."""
    is_same = _is_within(source, folder)
    if is_same and continues:
        return
    if is_same and _list_run(folder):
        raise CheckpointError(
            f"{source} lies in --save {folder}, which the new run would overwrite: choose another "
            "folder."
        )
    if _has_results(folder) and not overwrite:
        has_model = bool(find_checkpoints(folder)) or (folder / LAST).is_dir()
        state = "already holds a run" if has_model else "holds a run without a checkpoint"
        way_out = f"Resume it with --load {folder}, choose" if has_model else "Choose"
        raise CheckpointError(
            f"--save {folder} {state}. {way_out} another folder, or replace it with --overwrite. "
            "--resume auto resumes or starts a run, whichever is possible."
        )
    _refuse_foreign(folder, _find_foreign(folder))


def recover(folder: Path) -> None:
    """Finish what a killed run began: its replacement of an earlier run, or the way back."""
    shutil.rmtree(folder / _DELETED, ignore_errors=True)
    if (folder / _MOVING).is_dir():
        _move_back(folder)
    if (folder / REPLACED).is_dir():
        if find_checkpoints(folder):
            drop_replaced(folder)
        else:
            restore_replaced(folder)


def drop_replaced(folder: Path) -> None:
    """Delete the run that was moved aside, if there is one."""
    if (folder / REPLACED).is_dir():
        # Renamed first: what is deleted in part must not be taken for a complete run.
        (folder / REPLACED).rename(folder / _DELETED)
        shutil.rmtree(folder / _DELETED, ignore_errors=True)


def restore_replaced(folder: Path) -> None:
    """Move the earlier run back, in place of what the new one has written."""
    if not (folder / REPLACED).is_dir():
        return
    for path in _list_run(folder):
        _remove(path)
    (folder / REPLACED).rename(folder / _MOVING)
    _move_back(folder)
    get_logger().warning(
        "the run in %s was not replaced: the new one ended before its first checkpoint.", folder
    )


def note_best(folder: Path, step: int) -> None:
    """Write down the step of the model that is about to be exported to ``best``."""
    content = {"wrote": _read_names(folder), "best_step": step}
    replace_text(folder / RUN_FILE, json.dumps(content))


def keeps_best(folder: Path, step: int | None) -> bool:
    """Whether ``best`` holds the model of this step; one of another step is moved aside."""
    if not (folder / BEST).is_dir():
        return False
    if read_json(folder / RUN_FILE, or_nothing=True).get("best_step", step) == step:
        return True
    abandon(folder, [folder / BEST])
    return False


def set_aside(folder: Path) -> None:
    """Move the folder's earlier run into its ``previous`` folder; every rank must call it."""

    def move() -> None:
        foreign = [] if _list_run(folder / PREVIOUS) else [folder / PREVIOUS]
        _refuse_foreign(folder, [*_find_foreign(folder), *_keep_filled(foreign)])
        if not _list_run(folder):
            return
        for link in folder.glob("checkpoint-*"):
            if link.is_symlink():
                link.unlink()
        shutil.rmtree(folder / PREVIOUS, ignore_errors=True)
        _move_run(folder, folder / PREVIOUS)
        get_logger().info(f"the earlier run in {folder} was moved to {folder / PREVIOUS}")

    run_on_first(move, folder)


def _list_run(folder: Path) -> list[Path]:
    """What a run has written there; a loop of the user's own writes only checkpoints."""
    checkpoints = [path for path in find_checkpoints(folder) if (path / MANIFEST).exists()]
    names = [*_read_names(folder), RUN_FILE, *([TRACKER] if checkpoints else [])]
    paths = [*checkpoints, *(folder / name for name in dict.fromkeys(names))]
    paths = [path for path in paths if path.exists()]
    # The launcher's name alone says only that a run was about to begin.
    owner = [folder / OWNER_FILE] if paths and (folder / OWNER_FILE).exists() else []
    return paths + owner


def _has_results(folder: Path) -> bool:
    """Whether a run got far enough to leave anything but its own record."""
    return any(path.name not in (RUN_FILE, OWNER_FILE) for path in _list_run(folder))


def _read_names(folder: Path) -> list[str]:
    names = read_json(folder / RUN_FILE, or_nothing=True).get("wrote")
    return [name for name in _NAMES if isinstance(names, list) and name in names]


def _find_foreign(folder: Path) -> list[Path]:
    """What a run would overwrite, and no run wrote."""
    ours = _list_run(folder)
    wanted = [*find_checkpoints(folder), *(folder / name for name in _OVERWRITTEN)]
    return _keep_filled([path for path in wanted if path not in ours])


def _keep_filled(paths: list[Path]) -> list[Path]:
    """The paths at which something is that could be lost; an empty folder is nothing."""
    return [p for p in paths if p.exists() and (not p.is_dir() or any(p.iterdir()))]


def _refuse_foreign(folder: Path, foreign: list[Path]) -> None:
    if foreign:
        raise CheckpointError(
            f"a run in {folder} would overwrite {', '.join(str(path) for path in foreign)}, which "
            "no run wrote: move it, or choose another folder."
        )


def _is_within(source: Path | None, folder: Path) -> bool:
    path = source.resolve() if source is not None else None
    return path is not None and folder.resolve() in (path, path.parent)


def _move_run(folder: Path, target: Path) -> None:
    paths = _list_run(folder)
    target.mkdir()
    for path in paths:
        path.rename(target / path.name)


def _move_aside(folder: Path) -> None:
    _move_run(folder, folder / _MOVING)
    (folder / _MOVING).rename(folder / REPLACED)
    if (folder / REPLACED / BEST).is_dir() and not find_checkpoints(folder / REPLACED):
        get_logger().warning(
            f"the run in {folder} has a model in {BEST}/, but no checkpoint to resume from: it is "
            "replaced, and deleted once this run has a checkpoint or ends. To keep it, stop now "
            "and choose another --save folder."
        )
    else:
        get_logger().info(f"replacing the run in {folder} once this one has a checkpoint")


def _move_back(folder: Path) -> None:
    for path in (folder / _MOVING).iterdir():
        _remove(folder / path.name)
        path.rename(folder / path.name)
    (folder / _MOVING).rmdir()


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True) if not path.is_dir() else shutil.rmtree(path)
