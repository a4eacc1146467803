"""Where the numbers of a run go: ``metrics.jsonl``, and copies of it such as TensorBoard.

A tracker has three methods, called on rank 0 only; the loop and the dialects all report through it.
``metrics.jsonl`` has everything. Other trackers are copies, so one that fails is dropped with a
warning and never ends a run.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rapidformer.checkpoint.finding import METRICS_FILE
from rapidformer.checkpoint.publish import replace_text
from rapidformer.checkpoint.writing import writing
from rapidformer.errors import CheckpointError, WriteError
from rapidformer.log import get_logger, warn_once
from rapidformer.strict_json import format_json, parse_json


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker learns of the run when it starts."""

    name: str = "run"
    folder: Path | None = None
    """The run's folder; None if nothing is saved."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    resume_step: float = 0
    """The step after which a resumed run goes on: later numbers come again. Infinite: none do."""
    check_folder: Callable[[], None] = lambda: None
    """Raises a CheckpointError if the folder is another run's by now."""


class Tracker(Protocol):
    """Takes the numbers of a run."""

    def start(self, run: TrackedRun) -> None:
        """The run begins, or goes on."""

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Numbers and texts by name. The loop's are ``loss``, ``lr``, ``eval_loss``, ..."""

    def finish(self) -> None:
        """The run has ended, well or not."""


class TrackerList:
    """Trackers as one; those that fail are left out from then on."""

    def __init__(self, trackers: Iterable[Tracker], run: TrackedRun) -> None:
        self._trackers = list(trackers)
        for tracker in self._trackers:
            tracker.start(run)  # what cannot even start is the user's mistake

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        self._tell(lambda tracker: tracker.log(values, step))

    def finish(self) -> None:
        self._tell(lambda tracker: tracker.finish())

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as reason:
                get_logger().warning(
                    "%s cannot be written any more: %s", type(tracker).__name__, reason
                )
                self._trackers.remove(tracker)


class MetricsFile:
    """``metrics.jsonl``, an object per line; every line is on disk when the call returns.

    A resumed run continues the file, after removing the lines of steps that it will repeat. A disk
    that cannot be written to does not end the run: its lines are kept for the next call.
    """

    def __init__(self) -> None:
        self.path = Path(METRICS_FILE)
        self._pending: list[str] = []
        self._check_folder: Callable[[], None] = lambda: None
        self._last_kept: float | None = None
        """The step after which the lines in the file are still to be removed."""

    def start(self, run: TrackedRun) -> None:
        folder = run.folder or Path()
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._check_folder = folder / METRICS_FILE, run.check_folder
        if run.resume_step:
            _cut(self.path, run.resume_step)
        else:
            self.path.unlink(missing_ok=True)

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        line = dict(values) if step is None else {"step": step, **values}
        self._pending.append(format_json(line) + "\n")
        self.finish()

    def finish(self) -> None:
        """Do to the file what the disk has not allowed so far."""
        if not self._pending and self._last_kept is None:
            return
        try:
            with writing(self.path):
                self._check_folder()
                if self._last_kept is not None:
                    _cut(self.path, self._last_kept)
                    self._last_kept = None
                _append(self.path, "".join(self._pending).encode("utf-8"))
        except WriteError as error:
            warn_once(
                f"{self.path} cannot be written: {error.reason}. Training continues; the lines are "
                "written as soon as they can be.",
                is_local=True,  # only rank 0 has the file
            )
        except CheckpointError as error:
            # Another run's file; the next save stops this run on every rank.
            warn_once(str(error), is_local=True)
        else:
            self._pending = []

    def drop_after(self, step: float) -> None:
        """Remove the lines of later steps."""
        self._pending = [line for line in self._pending if _get_step(line) <= step]
        self._last_kept = step if self._last_kept is None else min(step, self._last_kept)
        self.finish()


def _cut(path: Path, step: float) -> None:
    """Remove the lines of later steps, and one that a crash has cut off."""
    if path.exists():
        if not path.is_file():  # reading a named pipe would never end
            raise OSError(errno.EINVAL, f"{path.name} is not a regular file")
        kept = [line for line in path.read_bytes().split(b"\n") if _get_step(line) <= step]
        replace_text(path, "".join(line.decode("utf-8") + "\n" for line in kept))


def _append(path: Path, text: bytes) -> None:
    """All of the text or nothing: a full disk may take half of a line."""

    def open_at_once(name: str, flags: int) -> int:
        """A named pipe is an error, and not waited for."""
        return os.open(name, flags | os.O_NONBLOCK, 0o666)

    with open(path, "ab", buffering=0, opener=open_at_once) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


def _get_step(line: str | bytes) -> float:
    """The step of a line; infinity for one that is damaged, or cut off by a crash."""
    try:
        return float(parse_json(line)["step"])
    except (ValueError, LookupError, TypeError, OverflowError):
        return float("inf")


def name_by_phase(name: str) -> str:
    """The names that TensorBoard groups: ``eval_x`` is ``eval/x``."""
    group, _, rest = name.partition("_")
    return f"{group}/{rest}" if group in ("eval", "test") else f"train/{name}"


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
        _quiet_board_threads()
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        if self.writer is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.writer.add_scalar(self._rename(name), value, step)

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()


@functools.cache
def _quiet_board_threads() -> None:
    """TensorBoard's thread hands its error to our next call, which warns: no traceback as well."""
    before = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        is_board = type(failure.thread).__module__.startswith("tensorboard.")
        if not (is_board and isinstance(failure.exc_value, OSError)):
            before(failure)

    threading.excepthook = report
