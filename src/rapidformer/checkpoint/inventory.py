"""Which runs and checkpoints are in a folder, and in what state: for ``rapidformer runs``.

Imports no torch and hashes nothing: a checkpoint counts as complete if its files have the sizes
that its manifest lists. Everything may change while it is read, since runs write all the time; a
line of ``metrics.jsonl`` that a crash has cut off is skipped.
"""

from __future__ import annotations

import bisect
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.finding import (
    ABANDONED,
    METRICS_FILE,
    PREVIOUS,
    REPLACED,
    RUN,
    RUN_FILE,
    STATE_INDEX,
    find_checkpoints,
    get_step,
    is_named,
)
from rapidformer.checkpoint.lock import is_held
from rapidformer.checkpoint.publish import MANIFEST, STAGING_PREFIX, find_damage, read_json
from rapidformer.strict_json import parse_object

_DEPTH = 3
_STEP = re.compile(rb'"step": ?(\d{1,19})\b')
_EVALUATION = "eval_"


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """A checkpoint, as far as one look tells."""

    path: Path
    step: int | None
    state: str
    """``complete``, ``damaged``, ``in progress`` or ``abandoned``."""
    problem: str | None
    bytes: int
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
    """``running``, ``complete``, ``stopped``, ``damaged``, ``killed``, ``replaced`` or ``no
    checkpoint``."""
    step: int | None
    train_iters: int | None
    """Where it was to end; None if its checkpoints do not say."""
    bytes: int
    modified: float
    loss: float | None
    best: dict[str, Any] | None
    """The best evaluation: its ``metric``, ``value`` and ``step``."""
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


def is_run(folder: Path) -> bool:
    """Whether a run has written to a folder."""
    return (folder / RUN_FILE).is_file() or bool(_list_checkpoints(folder) or _list_staged(folder))


def _walk(folder: Path, depth: int, inventory: Inventory, seen: set[tuple[int, int]]) -> None:
    try:
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:  # links may lead back
            return
        seen.add((status.st_dev, status.st_ino))
        if is_run(folder):
            inventory.runs.append(_describe_run(folder))
            children = [folder / name for name in (PREVIOUS, REPLACED)]
        else:
            entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
            children = [Path(entry) for entry in entries if entry.is_dir()]
    except FileNotFoundError:  # deleted meanwhile
        return
    except OSError as reason:
        inventory.unreadable.append(f"{folder} cannot be read: {reason.strerror}")
        return
    for child in children if depth else ():
        if child.is_dir():
            _walk(child, depth - 1, inventory, seen)


def _list_checkpoints(folder: Path) -> list[Path]:
    """Folders named like a checkpoint may be another trainer's."""
    return [path for path in find_checkpoints(folder) if is_checkpoint(path)]


def _list_staged(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{STAGING_PREFIX}iter_*") if path.is_dir()]


def _describe_run(folder: Path) -> RunEntry:
    is_running = is_held(folder)
    published, left_behind = _list_checkpoints(folder), _list_checkpoints(folder / ABANDONED)
    metrics = _read_metrics_at(folder, [*published, *left_behind])
    checkpoints = [entry for path in published for entry in _describe_checkpoint(path, metrics)]
    newest_first = checkpoints[::-1]  # the steps of those that are published only go up
    staged = [_describe_staged(path, is_running=bool(is_running)) for path in _list_staged(folder)]
    abandoned: list[CheckpointEntry] = []
    for path in reversed(left_behind):
        abandoned += _describe_checkpoint(path, metrics, state="abandoned")
    steps = [metrics.step, *(entry.step for entry in checkpoints)]
    times = [entry.modified for entry in checkpoints]
    times += [_get_time(folder / METRICS_FILE), _get_time(folder / RUN_FILE)]
    extra = _read_extra(newest_first)
    done, planned = extra.get("attempts"), extra.get("train_iters")
    is_short = isinstance(done, int) and isinstance(planned, int) and done < planned
    return RunEntry(
        path=folder, state=_judge_run(folder, newest_first, is_running, is_short=is_short),
        step=max((step for step in steps if step is not None), default=None),
        train_iters=planned if isinstance(planned, int) else None,
        bytes=_measure(folder), modified=max(times) or _get_time(folder), loss=metrics.loss,
        best=_find_best(folder, extra, metrics),
        checkpoints=[*staged, *newest_first, *abandoned],
    )  # fmt: skip


def _judge_run(
    folder: Path, checkpoints: list[CheckpointEntry], is_running: bool | None, *, is_short: bool
) -> str:
    if folder.name == REPLACED:
        return "replaced"
    if is_running:
        return "running"
    if not checkpoints:
        return "no checkpoint"
    if checkpoints[0].state == "damaged":
        return "damaged"
    # A run that ends by itself removes its lock.
    if is_running is False:
        return "killed"
    return "stopped" if is_short else "complete"


def _describe_checkpoint(
    folder: Path, metrics: RunMetrics, state: str | None = None
) -> Iterator[CheckpointEntry]:
    """One entry, or none if the run has deleted the checkpoint meanwhile."""
    problem = next(find_damage(folder, (RUN, STATE_INDEX), hashes=False), None)
    size, modified = _measure(folder), _get_time(folder / MANIFEST) or _get_time(folder)
    if not folder.is_dir():
        return
    step = _get_step(folder)
    yield CheckpointEntry(
        path=folder, step=step, state="damaged" if problem else state or "complete",
        problem=problem, bytes=size, modified=modified, loss=metrics.losses.get(step or 0),
        metrics=metrics.evaluations.get(step or 0, {}),
    )  # fmt: skip


def _describe_staged(folder: Path, *, is_running: bool) -> CheckpointEntry:
    name = folder.name.removeprefix(STAGING_PREFIX)
    return CheckpointEntry(
        path=folder, step=_get_step(folder.with_name(name)),
        state="in progress" if is_running else "abandoned",
        problem=None if is_running else "its save was interrupted; the next start removes it",
        bytes=_measure(folder), modified=_get_time(folder),
    )  # fmt: skip


def _get_step(folder: Path) -> int | None:
    """The step by the folder's name; one that was renamed says it in ``run.json``."""
    if is_named(folder):
        return get_step(folder)
    step = read_json(folder / RUN, or_nothing=True).get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _read_metrics_at(run: Path, checkpoints: list[Path]) -> RunMetrics:
    steps = [_get_step(path) for path in checkpoints]
    return read_metrics(run / METRICS_FILE, [step for step in steps if step is not None])


def _read_extra(checkpoints: list[CheckpointEntry]) -> dict[str, Any]:
    """What the loop has written into the newest whole checkpoint."""
    newest = next((entry.path for entry in checkpoints if entry.problem is None), None)
    extra = read_json(newest / RUN, or_nothing=True).get("extra") if newest else None
    return extra if isinstance(extra, dict) else {}


def _find_best(folder: Path, extra: dict[str, Any], metrics: RunMetrics) -> dict[str, Any] | None:
    """`.run.json` has its step, checkpoints have the metric's name."""
    progress = extra.get("progress")
    name = progress.get("best_metric") if isinstance(progress, dict) else None
    step = read_json(folder / RUN_FILE, or_nothing=True).get("best_step")
    results = metrics.evaluations.get(step, {}) if isinstance(step, int) else {}
    # The first checkpoint of a run may come after its first evaluation.
    metric = name if name in results else next(iter(results), None)
    return {"metric": metric, "value": results[metric], "step": step} if metric else None


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
                status = os.lstat(os.path.join(parent, name))  # noqa: PTH118 (thousands of files)
            except OSError:
                continue
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


# ---- metrics.jsonl, which may be long: only the lines that are needed are parsed -----------------


@dataclass(kw_only=True)
class RunMetrics:
    """What a run has logged so far."""

    step: int | None = None
    """The last step that was logged."""
    loss: float | None = None
    losses: dict[int, float] = field(default_factory=dict)
    """The last training loss that was logged up to a step."""
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """The results of the evaluation at a step, by the metric's name."""


def read_metrics(path: Path, steps: Iterable[int]) -> RunMetrics:
    """The last loss, the loss at each of these steps, and all evaluations."""
    wanted = sorted(set(steps))
    # One line for each wanted step, and one for the end of the file.
    lines: list[bytes | None] = [None] * (len(wanted) + 1)
    metrics = RunMetrics()
    try:
        if not path.is_file():  # opening a named pipe would wait for a writer
            return metrics
        with path.open("rb") as file:
            for line in file:
                match = _STEP.search(line)
                if match is None:
                    continue
                step = int(match[1])
                if b'"eval_' in line:
                    metrics.evaluations.setdefault(step, {}).update(_read_evaluation(line))
                elif b'"loss"' in line:
                    lines[bisect.bisect_left(wanted, step)] = line
                    metrics.step = step
    except OSError:
        return metrics
    for place, kept in enumerate(lines):
        if kept is not None:
            metrics.loss = _get_number(parse_object(kept) or {}, "loss")
        if place < len(wanted) and metrics.loss is not None:
            metrics.losses[wanted[place]] = metrics.loss
    return metrics


def _read_evaluation(line: bytes) -> dict[str, float]:
    content = parse_object(line) or {}
    numbers = {name: _get_number(content, name) for name in content}
    return {
        name.removeprefix(_EVALUATION): number
        for name, number in numbers.items()
        if name.startswith(_EVALUATION) and number is not None
    }


def _get_number(content: dict[str, Any], name: str) -> float | None:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None
