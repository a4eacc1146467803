"""``metrics.jsonl``: every number of a run, complete on disk line by line."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.finding import METRICS_FILE
from rapidformer.checkpoint.publish import replace_text
from rapidformer.checkpoint.writing import writing
from rapidformer.errors import CheckpointError, WriteError
from rapidformer.log import warn_once
from rapidformer.strict_json import format_json, parse_json
from rapidformer.training.trackers.tracker import TrackedRun


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
    """The step of a line, infinity if it names none; NaN for one that is damaged or cut off."""
    try:
        return float(parse_json(line).get("step", math.inf))
    except (ValueError, AttributeError, TypeError, OverflowError):
        return math.nan
