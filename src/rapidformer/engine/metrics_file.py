"""Where the numbers of a run go: ``metrics.jsonl``, and TensorBoard.

``metrics.jsonl`` has one JSON object per line. A resumed run continues the same file, after
removing the lines of steps that it will repeat.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.publish import replace_text
from rapidformer.checkpoint.run_names import METRICS_FILE
from rapidformer.checkpoint.writing import writing
from rapidformer.log import warn_once
from rapidformer.strict_json import format_json


class MetricsFile:
    """Appends to ``metrics.jsonl``; every line is on disk when the call returns."""

    def __init__(self, folder: Path, *, resume_step: float = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS_FILE
        if resume_step and self.path.exists():
            self.drop_after(resume_step)
        elif not resume_step:
            self.path.unlink(missing_ok=True)

    def write(self, line: dict[str, Any]) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(format_json(line) + "\n")

    def drop_after(self, step: float) -> None:
        """Remove the lines of later steps, and one that a crash has cut off."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _get_step(line) <= step]
        replace_text(self.path, "".join(line + "\n" for line in kept))


def _get_step(line: str) -> float:
    """The step of a line; infinity for a line cut off by a crash."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def open_board(folder: str | Path, resume_step: int = 0) -> Any:
    """TensorBoard's writer; None, with a warning, where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warn_once(
            "no TensorBoard logs: run pip install tensorboard. metrics.jsonl has all the numbers."
        )
        return None
    purge_step = resume_step + 1 if resume_step else None
    return SummaryWriter(str(folder), purge_step=purge_step)  # type: ignore[no-untyped-call]
