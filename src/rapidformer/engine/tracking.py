"""What ``accelerator.log`` writes: ``metrics.jsonl`` and TensorBoard's files.

An earlier run's lines are kept: a script that resumes says so only after ``init_trackers``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import yaml

from rapidformer.engine.metrics_file import MetricsFile, open_board
from rapidformer.log import warn_once


class Tracker:
    """Writes numbers on the main process, once ``start`` was called."""

    def __init__(
        self,
        *,
        project_folder: str | Path | None,
        board_folder: str | Path | None,
        is_wanted: bool,
        is_main: bool,
    ) -> None:
        self._project_folder = project_folder or board_folder
        self._board_folder = board_folder or project_folder
        self._is_wanted = is_wanted
        self._is_main = is_main
        self._file: MetricsFile | None = None
        self._board: Any = None

    def start(self, project_name: str, config: dict[str, Any]) -> None:
        """Open the files, and write the script's settings to ``hparams.yml``."""
        if not (self._is_main and self._is_wanted and self._project_folder and self._board_folder):
            return
        self._file = MetricsFile(Path(self._project_folder), resume_step=math.inf)
        folder = Path(self._board_folder) / project_name
        folder.mkdir(parents=True, exist_ok=True)
        plain = {name: _to_plain(value) for name, value in config.items()}
        (folder / "hparams.yml").write_text(yaml.safe_dump(plain, sort_keys=False))
        self._board = open_board(folder)

    def log(self, values: dict[str, Any], step: int | None) -> None:
        """Write one line; the values of a nested dictionary become ``outer/inner``."""
        if not self._is_main:
            return
        if self._file is None:
            warn_once(
                'accelerator.log() writes nothing: make Accelerator(log_with="tensorboard", '
                "project_dir=...) and call init_trackers() first."
            )
            return
        flat = _flatten(values)
        self._file.write(flat if step is None else {"step": step, **flat})
        for name, value in flat.items():
            if self._board is not None and isinstance(value, (int, float)):
                self._board.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


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
