"""TensorBoard's files. Its writer has a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rapidformer.compat.patches import Change
from rapidformer.log import warn_once
from rapidformer.training.trackers.tracker import TrackedRun, keep_numbers, name_by_phase


def _quiet_board_threads() -> Callable[[], None]:
    """TensorBoard's thread hands its error to our next call, which warns: no traceback as well."""
    before = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        is_board = type(failure.thread).__module__.startswith("tensorboard.")
        if not (is_board and isinstance(failure.exc_value, OSError)):
            before(failure)

    def restore() -> None:
        if threading.excepthook is report:
            threading.excepthook = before

    threading.excepthook = report
    return restore


_QUIET = Change(_quiet_board_threads)


class TensorBoard:
    """Writes every number as a scalar; without TensorBoard, a warning and nothing."""

    def __init__(
        self, folder: str | Path | None = None, rename: Callable[[str], str] = name_by_phase
    ) -> None:
        """Without a folder, the run's is used."""
        self._folder = folder
        self._rename = rename
        self.writer: Any = None
        """TensorBoard's ``SummaryWriter``."""
        self._open = ExitStack()

    def start(self, run: TrackedRun) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            warn_once(
                "no TensorBoard logs: run pip install tensorboard. metrics.jsonl has all the "
                "numbers."
            )
            return
        folder = self._folder or (run.folder or Path()) / "tensorboard"
        resumes = 0 < run.resume_step < float("inf")
        purge_step = int(run.resume_step) + 1 if resumes else None
        self._open.enter_context(_QUIET)
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        if self.writer is not None:
            for name, value in keep_numbers(values).items():
                self.writer.add_scalar(self._rename(name), value, step)

    def finish(self) -> None:
        with self._open:
            if self.writer is not None:
                self.writer.close()
