"""What ``accelerator.log`` writes: ``metrics.jsonl``, TensorBoard's files, the user's own trackers.

An earlier run's lines are kept: a script that resumes says so only after ``init_trackers``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from rapidformer.errors import RapidformerError
from rapidformer.log import warn_once
from rapidformer.training.trackers import MetricsFile, TensorBoard, TrackedRun


class BlankTracker:
    """A tracker that does nothing: what a process that does not log gets."""

    name = "blank"
    tracker = None

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None: ...

    def finish(self) -> None: ...


class BoardTracker:
    """TensorBoard's files, with the settings beside them, and ``metrics.jsonl``."""

    name = "tensorboard"

    def __init__(self, project_folder: str | Path, board_folder: str | Path) -> None:
        self._project_folder = Path(project_folder)
        self._board_folder = Path(board_folder)
        self._file = MetricsFile()
        self._board = TensorBoard()

    @property
    def tracker(self) -> Any:
        """TensorBoard's ``SummaryWriter``."""
        return self._board.writer

    writer = tracker

    def start(self, run: TrackedRun) -> None:
        self._file.start(replace(run, folder=self._project_folder))
        folder = self._board_folder / run.name
        folder.mkdir(parents=True, exist_ok=True)
        self._board = TensorBoard(folder, rename=str)
        self._board.start(run)
        plain = {name: _to_plain(value) for name, value in run.settings.items()}
        text = yaml.safe_dump(plain, sort_keys=False)
        (folder / "hparams.yml").write_text(text, encoding="utf-8")

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write one line; the values of a nested dictionary become ``outer/inner``."""
        flat = _flatten(values)
        self._file.log(flat, step)
        self._board.log(flat, step)

    def finish(self) -> None:
        self._board.finish()


class ForeignTracker:
    """One of Accelerate's trackers (``GeneralTracker``) as one of ours."""

    def __init__(self, tracker: Any) -> None:
        self.original = tracker

    def start(self, run: TrackedRun) -> None:
        if hasattr(self.original, "start"):
            self.original.start()
        self.original.store_init_configuration(dict(run.settings))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self.original.log(values, step=step, **options)

    def finish(self) -> None:
        self.original.finish()


class Trackers:
    """The trackers of a script by name; most write on the main process only."""

    def __init__(self, board: BoardTracker | None, others: list[Any], *, is_main: bool) -> None:
        self._is_main = is_main
        self._waiting: list[Any] = [board] if board is not None and is_main else []
        self._waiting += [
            tracker
            for tracker in others
            if is_main or not getattr(tracker, "main_process_only", True)
        ]
        self._started: dict[str, Any] = {}

    @property
    def started(self) -> list[Any]:
        """As the script knows them."""
        return [getattr(tracker, "original", tracker) for tracker in self._started.values()]

    def start(self, project_name: str, config: dict[str, Any]) -> None:
        """Open them, and hand on the script's settings."""
        run = TrackedRun(name=project_name, settings=config, resume_step=math.inf)
        for tracker in self._waiting:
            is_foreign = hasattr(tracker, "store_init_configuration")
            entry: Any = ForeignTracker(tracker) if is_foreign else tracker
            entry.start(run)
            self._started[getattr(tracker, "name", type(tracker).__name__)] = entry

    def get(self, name: str, *, unwrap: bool) -> Any:
        """One of them by its name, or what it writes with."""
        if not self._started and not self._is_main:
            return BlankTracker()
        if name in self._started:
            tracker = getattr(self._started[name], "original", self._started[name])
            return getattr(tracker, "tracker", tracker) if unwrap else tracker
        names = ", ".join(self._started)
        raise RapidformerError(
            f"get_tracker({name!r}): "
            + (f"there is {names}." if names else "call init_trackers() first.")
        )

    def log(self, values: dict[str, Any], step: int | None, options: dict[str, Any]) -> None:
        """Pass numbers to all of them; ``options`` has more arguments by a tracker's name."""
        if self._is_main and not self._started:
            warn_once(
                'accelerator.log() writes nothing: make Accelerator(log_with="tensorboard", '
                "project_dir=...) and call init_trackers() first."
            )
        for name, tracker in self._started.items():
            tracker.log(values, step, **options.get(name, {}))

    def close(self) -> None:
        for tracker in self._started.values():
            tracker.finish()


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = _to_plain(value)
    return flat


def _to_plain(value: Any) -> Any:
    """A value as JSON and YAML can hold it; what they cannot hold as text."""
    if isinstance(value, torch.Tensor) or hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
