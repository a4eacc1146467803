"""Which runs and checkpoints are in a folder, and in what state: for ``rapidformer runs``.

Imports no torch and hashes nothing: a checkpoint counts as complete if its files have the sizes
that its manifest lists. Everything may change while it is read, since runs write all the time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.finding import find_checkpoints, get_step, is_named
from rapidformer.checkpoint.lock import is_held
from rapidformer.checkpoint.publish import MANIFEST, STAGING_PREFIX, find_damage, read_json
from rapidformer.checkpoint.run_file import RUN
from rapidformer.checkpoint.run_metrics import RunMetrics, read_metrics
from rapidformer.checkpoint.run_names import METRICS_FILE, PREVIOUS, REPLACED, RUN_FILE
from rapidformer.errors import CheckpointError

# The second is torch's own, which older checkpoints have alone.
_INDEXES = ("state/index.json", "state/.metadata")
_ABANDONED = ".abandoned"
_DEPTH = 3


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """A checkpoint, as far as one look tells."""

    path: Path
    step: int | None
    state: str
    """``complete``, ``damaged``, ``in progress`` or ``abandoned``."""
    problem: str | None
    size: int
    modified: float
    loss: float | None = None
    """The last training loss that was logged before it was saved."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The evaluation at its step."""


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A run and its checkpoints, the newest first."""

    path: Path
    state: str
    """``running``, ``complete``, ``damaged``, ``killed``, ``replaced`` or ``no checkpoint``."""
    step: int | None
    size: int
    modified: float
    loss: float | None
    best_metric: str | None
    best_value: float | None
    best_step: int | None
    checkpoints: list[CheckpointEntry]


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What was found under a folder, the newest first."""

    folder: Path
    runs: list[RunEntry] = field(default_factory=list)
    checkpoints: list[CheckpointEntry] = field(default_factory=list)
    """The folder itself, if it is a checkpoint."""
    unreadable: list[str] = field(default_factory=list)


def take_inventory(folder: Path) -> Inventory:
    """Everything of ours in a folder and up to three levels below it."""
    inventory = Inventory(folder=folder)
    if is_checkpoint(folder):
        metrics = _read_metrics_at(folder.parent, [folder])
        inventory.checkpoints.extend(_describe_checkpoint(folder, metrics))
    else:
        _walk(folder, _DEPTH, inventory, set())
    inventory.runs.sort(key=lambda run: (-run.modified, str(run.path)))
    return inventory


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, or what is left of one."""
    parts = [(folder / RUN).is_file(), (folder / MANIFEST).is_file(), (folder / "state").is_dir()]
    return sum(parts) >= (1 if is_named(folder) else 2)


def list_required(folder: Path) -> tuple[str, ...]:
    """The files without which a checkpoint cannot be loaded."""
    return RUN, next((name for name in _INDEXES if (folder / name).exists()), _INDEXES[0])


def is_run(folder: Path) -> bool:
    """Whether a run has written to a folder."""
    return (folder / RUN_FILE).is_file() or bool(_list_checkpoints(folder) or _list_staged(folder))


def _walk(folder: Path, depth: int, inventory: Inventory, seen: set[tuple[int, int]]) -> None:
    try:
        found = folder.stat()
        if (found.st_dev, found.st_ino) in seen:  # links may lead back
            return
        seen.add((found.st_dev, found.st_ino))
        if is_run(folder):
            inventory.runs.append(_describe_run(folder))
            children = [folder / name for name in (PREVIOUS, REPLACED)]
        else:
            children = [Path(entry) for entry in os.scandir(folder) if _is_visible_folder(entry)]
    except FileNotFoundError:  # deleted meanwhile
        return
    except OSError as reason:
        inventory.unreadable.append(f"{folder} cannot be read: {reason.strerror}")
        return
    for child in children if depth else ():
        if child.is_dir():
            _walk(child, depth - 1, inventory, seen)


def _is_visible_folder(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.is_dir()


def _list_checkpoints(folder: Path) -> list[Path]:
    """Folders named like a checkpoint may be another trainer's."""
    return [path for path in find_checkpoints(folder) if is_checkpoint(path)]


def _list_staged(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{STAGING_PREFIX}iter_*") if path.is_dir()]


def _describe_run(folder: Path) -> RunEntry:
    is_running = is_held(folder)
    published, left_behind = _list_checkpoints(folder), _list_checkpoints(folder / _ABANDONED)
    metrics = _read_metrics_at(folder, [*published, *left_behind])
    checkpoints = [entry for path in published for entry in _describe_checkpoint(path, metrics)]
    newest_first = checkpoints[::-1]  # the steps of those that are published only go up
    staged = [_describe_staged(path, is_running=bool(is_running)) for path in _list_staged(folder)]
    abandoned = [
        entry
        for path in reversed(left_behind)
        for entry in _describe_checkpoint(path, metrics, state="abandoned")
    ]
    steps = [entry.step for entry in checkpoints]
    times = [entry.modified for entry in checkpoints]
    times += [_get_time(folder / METRICS_FILE), _get_time(folder / RUN_FILE)]
    return RunEntry(
        path=folder,
        state=_judge_run(folder, newest_first, is_running),
        step=max([step for step in (metrics.step, *steps) if step is not None], default=None),
        size=_measure(folder),
        modified=max(times) or _get_time(folder),
        loss=metrics.loss,
        **_find_best(folder, newest_first, metrics),
        checkpoints=[*staged, *newest_first, *abandoned],
    )


def _judge_run(folder: Path, checkpoints: list[CheckpointEntry], is_running: bool | None) -> str:
    if folder.name == REPLACED:
        return "replaced"
    if is_running:
        return "running"
    if not checkpoints:
        return "no checkpoint"
    if checkpoints[0].state == "damaged":
        return "damaged"
    # A run that ends by itself removes its lock.
    return "killed" if is_running is False else "complete"


def _describe_checkpoint(
    folder: Path, metrics: RunMetrics, state: str | None = None
) -> Iterator[CheckpointEntry]:
    """One entry, or none if the run has deleted the checkpoint meanwhile."""
    problem = next(find_damage(folder, list_required(folder), hashes=False), None)
    size, modified = _measure(folder), _get_time(folder / MANIFEST) or _get_time(folder)
    if not folder.is_dir():
        return
    step = _get_step(folder)
    yield CheckpointEntry(
        path=folder,
        step=step,
        state="damaged" if problem else state or "complete",
        problem=problem,
        size=size,
        modified=modified,
        loss=metrics.losses.get(step or 0),
        metrics=metrics.evaluations.get(step or 0, {}),
    )


def _describe_staged(folder: Path, *, is_running: bool) -> CheckpointEntry:
    name = folder.name.removeprefix(STAGING_PREFIX)
    return CheckpointEntry(
        path=folder,
        step=_get_step(folder.with_name(name)),
        state="in progress" if is_running else "abandoned",
        problem=None if is_running else "its save was interrupted; the next start removes it",
        size=_measure(folder),
        modified=_get_time(folder),
    )


def _get_step(folder: Path) -> int | None:
    """The step by the folder's name; one that was renamed says it in ``run.json``."""
    if is_named(folder):
        return get_step(folder)
    step = _read(folder / RUN).get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _read_metrics_at(run: Path, checkpoints: list[Path]) -> RunMetrics:
    steps = [_get_step(path) for path in checkpoints]
    return read_metrics(run / METRICS_FILE, [step for step in steps if step is not None])


def _find_best(
    folder: Path, checkpoints: list[CheckpointEntry], metrics: RunMetrics
) -> dict[str, Any]:
    """The best evaluation: `.run.json` has its step, checkpoints have the metric's name."""
    newest = next((entry.path for entry in checkpoints if entry.problem is None), None)
    extra = _read(newest / RUN).get("extra") if newest else None
    progress = extra.get("progress") if isinstance(extra, dict) else None
    name = progress.get("best_metric") if isinstance(progress, dict) else None
    step = _read(folder / RUN_FILE).get("best_step")
    if not isinstance(step, int):
        return {"best_metric": None, "best_value": None, "best_step": None}
    results = metrics.evaluations.get(step, {})
    # The first checkpoint of a run may come after its first evaluation.
    chosen = name if name in results else next(iter(results), None)
    return {
        "best_metric": chosen,
        "best_value": results.get(chosen or ""),
        "best_step": step if chosen else None,
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except CheckpointError:
        return {}


def _get_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _measure(folder: Path) -> int:
    """The bytes of all files in a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(parent, name))  # noqa: PTH118 (thousands of files)
            except OSError:
                continue
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total
