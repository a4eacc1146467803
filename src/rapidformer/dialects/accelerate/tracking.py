"""What ``accelerator.log`` writes: ``metrics.jsonl``, TensorBoard's files, the user's own trackers.

An earlier run's lines are kept: a script that resumes says so only after ``init_trackers``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import yaml

from rapidformer.engine.metrics_file import MetricsFile, open_board
from rapidformer.errors import RapidformerError
from rapidformer.log import warn_once


class BlankTracker:
    """A tracker that does nothing: what a process that does not log gets."""

    name = "blank"
    tracker = None

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None: ...

    def finish(self) -> None: ...


class BoardTracker:
    """TensorBoard's files and ``metrics.jsonl``, once ``start`` was called."""

    name = "tensorboard"

    def __init__(self, project_folder: str | Path, board_folder: str | Path) -> None:
        self._project_folder = Path(project_folder)
        self._board_folder = Path(board_folder)
        self._file: MetricsFile | None = None
        self.tracker: Any = None
        """TensorBoard's ``SummaryWriter``."""

    @property
    def writer(self) -> Any:
        return self.tracker

    def start(self, project_name: str) -> None:
        """Open the files."""
        self._file = MetricsFile(self._project_folder, resume_step=math.inf)
        self._board_folder = self._board_folder / project_name
        self._board_folder.mkdir(parents=True, exist_ok=True)
        self.tracker = open_board(self._board_folder)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the script's settings to ``hparams.yml``."""
        plain = {name: _to_plain(value) for name, value in values.items()}
        text = yaml.safe_dump(plain, sort_keys=False)
        (self._board_folder / "hparams.yml").write_text(text, encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Write one line; the values of a nested dictionary become ``outer/inner``."""
        assert self._file is not None
        flat = _flatten(values)
        self._file.write(flat if step is None else {"step": step, **flat})
        for name, value in flat.items():
            if self.tracker is not None and isinstance(value, (int, float)):
                self.tracker.add_scalar(name, value, global_step=step)

    def finish(self) -> None:
        if self.tracker is not None:
            self.tracker.close()


class Trackers:
    """The trackers of a script; most write on the main process only."""

    def __init__(self, board: BoardTracker | None, given: list[Any], *, is_main: bool) -> None:
        self._board = board
        self._is_main = is_main
        self._given = [
            each for each in given if is_main or not getattr(each, "main_process_only", True)
        ]
        self.started: list[Any] = []

    def start(self, project_name: str, config: dict[str, Any]) -> None:
        """Open them, and hand on the script's settings."""
        if self._board is not None and self._is_main:
            self._board.start(project_name)
            self.started.append(self._board)
        for each in self._given:
            if hasattr(each, "start"):
                each.start()
            self.started.append(each)
        for each in self.started:
            each.store_init_configuration(config)

    def get(self, name: str, *, unwrap: bool) -> Any:
        """One of them by its name, or what it writes with."""
        if not self.started and not self._is_main:
            return BlankTracker()
        for each in self.started:
            if each.name == name:
                return each.tracker if unwrap else each
        names = ", ".join(each.name for each in self.started)
        raise RapidformerError(
            f"get_tracker({name!r}): "
            + (f"there is {names}." if names else "call init_trackers() first.")
        )

    def log(self, values: dict[str, Any], step: int | None, options: dict[str, Any]) -> None:
        """Pass numbers to all of them; ``options`` has more arguments by a tracker's name."""
        if self._is_main and not self.started:
            warn_once(
                'accelerator.log() writes nothing: make Accelerator(log_with="tensorboard", '
                "project_dir=...) and call init_trackers() first."
            )
        for each in self.started:
            each.log(values, step=step, **options.get(each.name, {}))

    def close(self) -> None:
        for each in self.started:
            each.finish()


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = _to_plain(value)
    return flat


def _to_plain(value: Any) -> Any:
    """A value as JSON and YAML can hold it; what they cannot hold as text."""
    if isinstance(value, torch.Tensor) or hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
