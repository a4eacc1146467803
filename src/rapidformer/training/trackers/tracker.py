"""The interface of a tracker: three methods, called on rank 0 only.

The loop and the dialects all report through it. ``metrics.jsonl`` has everything;
other trackers are copies, so one that fails is dropped with a warning and never ends a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rapidformer.log import get_logger


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker learns of the run when it starts."""

    name: str = "run"
    folder: Path | None = None
    """The run's folder; None if nothing is saved."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    resume_step: float = 0
    """The step after which a resumed run goes on: later numbers come again. Infinite: none do."""


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
