"""The folder of a run (``--save``): who may write to it."""

from __future__ import annotations

import shutil
from pathlib import Path

from rapidformer.checkpoint.store import TRACKER, find_checkpoints
from rapidformer.dist.collectives import broadcast_object
from rapidformer.engine.metrics_file import METRICS_FILE
from rapidformer.errors import CheckpointError
from rapidformer.log import get_logger

BEST = "best"
LAST = "last"
ARGUMENTS_FILE = "arguments.yaml"
PREVIOUS = "previous"


def check_run_folder(
    folder: Path, *, source: Path | None, continues: bool, overwrite: bool
) -> None:
    """Refuse to overwrite another run; ``--overwrite`` removes what that run wrote.

    ``source`` is what ``--load`` names; a run that ``continues`` may use its own folder again.
    """
    if not _is_run(folder):
        return
    is_same = source is not None and folder.resolve() in (
        source.resolve(),
        source.resolve().parent,
    )
    if is_same and continues:
        return
    if is_same:
        raise CheckpointError(
            f"--finetune starts a new run from {source}, which --save {folder} would overwrite: "
            "choose another folder."
        )
    if not overwrite:
        raise CheckpointError(
            f"--save {folder} already holds a run. Resume it with --load {folder}, choose another "
            "folder, or replace it with --overwrite."
        )
    for path in [*find_checkpoints(folder), folder / BEST, folder / LAST, folder / "tensorboard"]:
        shutil.rmtree(path, ignore_errors=True)
    for name in (METRICS_FILE, TRACKER, ARGUMENTS_FILE):
        (folder / name).unlink(missing_ok=True)


def set_aside(folder: Path, *, is_main: bool) -> None:
    """Move the folder's earlier run into its ``previous`` folder, which holds only one run.

    For front ends that train into the same folder again without asking. Every rank must call it:
    rank 0 moves, and what it finds wrong stops all ranks.
    """
    problem = None
    if is_main:
        try:
            _refuse_foreign_folders(folder)
            if _is_run(folder):
                _move_to_previous(folder)
        except CheckpointError as error:
            problem = str(error)
    problem = broadcast_object(problem)
    if problem is not None:
        raise CheckpointError(problem)


def _is_run(folder: Path) -> bool:
    return (folder / METRICS_FILE).exists() or bool(find_checkpoints(folder))


def _refuse_foreign_folders(folder: Path) -> None:
    """A run would overwrite folders of these names, whoever made them."""
    foreign = [] if _is_run(folder) else [folder / BEST, folder / LAST]
    if not _is_run(folder / PREVIOUS):
        foreign.append(folder / PREVIOUS)
    foreign = [
        path for path in foreign if path.is_file() or (path.is_dir() and any(path.iterdir()))
    ]
    if foreign:
        raise CheckpointError(
            f"a run in {folder} would overwrite {', '.join(str(path) for path in foreign)}, which "
            "no run wrote: move it, or choose another folder."
        )


def _move_to_previous(folder: Path) -> None:
    names = (METRICS_FILE, TRACKER, ARGUMENTS_FILE, BEST, LAST, "tensorboard")
    found = [*find_checkpoints(folder), *(folder / name for name in names)]
    found = [path for path in found if path.exists()]
    for link in folder.glob("checkpoint-*"):
        if link.is_symlink():
            link.unlink()
    shutil.rmtree(folder / PREVIOUS, ignore_errors=True)
    (folder / PREVIOUS).mkdir()
    for path in found:
        path.rename(folder / PREVIOUS / path.name)
    get_logger().info(f"the earlier run in {folder} was moved to {folder / PREVIOUS}")
