"""What a tracker is, what it learns of a run, and the names that it gives to the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rapidformer.checkpoint.finding import METRICS_FILE, TRACKERS_FOLDER
from rapidformer.checkpoint.publish import replace_text
from rapidformer.log import get_logger
from rapidformer.strict_json import parse_json


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
    asked_name: str | None = None
    """The user's own name for the run, before any environment variable of a tracker."""
    asked_project: str | None = None
    """The user's own name for the project."""
    project: str = "rapidformer"
    """The project if nobody names one."""

    @property
    def tracker_folder(self) -> Path:
        """Where trackers keep files if they have no place of their own."""
        return self.folder / TRACKERS_FOLDER if self.folder is not None else Path()

    def recall(self, tracker: str) -> str | None:
        """The id that the tracker gave this run before it was interrupted."""
        if self.folder is None or not self.resume_step:
            return None
        try:
            return self._get_id_file(tracker).read_text(encoding="utf-8").strip() or None
        except (OSError, ValueError):
            return None

    def remember(self, tracker: str, run_id: str) -> None:
        """Keep the id for the day when this run is resumed."""
        if self.folder is not None:
            self.tracker_folder.mkdir(parents=True, exist_ok=True)
            replace_text(self._get_id_file(tracker), run_id)

    def read_earlier(self) -> Iterator[tuple[dict[str, Any], int]]:
        """What a resumed run has logged up to its checkpoint; a killed tracker may lack some."""
        if self.folder is None or not 0 < self.resume_step < float("inf"):
            return
        with suppress(OSError, ValueError):
            text = (self.folder / METRICS_FILE).read_text(encoding="utf-8")
            for line in map(parse_json, text.splitlines()):
                if (step := line.pop("step", None)) is not None and step <= self.resume_step:
                    yield line, step

    def _get_id_file(self, tracker: str) -> Path:
        return self.tracker_folder / f"{tracker}.id"


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
                warn_of_loss(type(tracker).__name__, reason)
                self._trackers.remove(tracker)


def warn_of_loss(tracker: str, reason: BaseException) -> None:
    """Training goes on without the tracker."""
    text = " ".join(str(reason).split()) or type(reason).__name__
    get_logger().warning("%s cannot be written any more: %s", tracker, text)


def name_by_phase(name: str) -> str:
    """The names that trackers group: ``eval_x`` is ``eval/x``, ``lr`` ``train/learning_rate``."""
    group, _, rest = name.partition("_")
    return f"{group}/{rest}" if group in ("eval", "test") else f"train/{name_plainly(name)}"


def name_plainly(name: str) -> str:
    """The name without a group."""
    return "learning_rate" if name == "lr" else name


def keep_numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    """Without texts, which a curve cannot show."""
    return {n: v for n, v in values.items() if isinstance(v, (int, float))}


class SentPoints:
    """What a resumed run's tracker has already: a point that comes again is not sent again.

    A resumed run computes the same numbers again, so the first point is as good as the second.
    """

    def __init__(self, last_steps: Mapping[str, int] | None = None, everything: int = -1) -> None:
        """``last_steps``: by name; ``everything``: of all names that are not listed."""
        self._last_steps, self._everything = dict(last_steps or {}), everything

    def knows(self, name: str) -> bool:
        """Whether the tracker may have points of this name; one with no points at all may.

        ``metrics.jsonl`` also has what another system's trainer does not report.
        """
        return not self._last_steps or name in self._last_steps

    def drop_from(self, values: Mapping[str, Any], step: int | None) -> dict[str, Any]:
        """The values that are new at this step."""
        if step is None:
            return dict(values)
        last = self._last_steps
        return {n: v for n, v in values.items() if step > last.get(n, self._everything)}
