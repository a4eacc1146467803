"""What ``accelerator.log`` writes: ``metrics.jsonl``, TensorBoard's files, and to other trackers.

An earlier run's lines are kept: a script that resumes says so only after ``init_trackers``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from rapidformer.dialects.accelerate.processes import ProcessVerbs
from rapidformer.dialects.accelerate.settings import find_tracker_classes, list_own_trackers
from rapidformer.dialects.calls import flatten
from rapidformer.errors import RapidformerError
from rapidformer.log import warn_once
from rapidformer.training.trackers import Background, MetricsFile, TensorBoard, TrackedRun
from rapidformer.training.trackers.build import OWN, build_tracker


class BlankTracker:
    """A tracker that does nothing: what a process that does not log gets."""

    name = "blank"
    tracker = None

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None: ...

    def finish(self) -> None: ...


_BLANK = BlankTracker()


class BoardTracker:
    """TensorBoard's files, with the settings beside them, and ``metrics.jsonl``."""

    name = "tensorboard"

    def __init__(self, run: TrackedRun, project_folder: str, board_folder: str) -> None:
        self._file = MetricsFile()
        self._file.start(replace(run, folder=Path(project_folder)))
        folder = Path(board_folder) / run.name
        folder.mkdir(parents=True, exist_ok=True)
        self._board = TensorBoard(folder, rename=str)
        self._board.start(run)
        plain = {name: _to_plain(value) for name, value in run.settings.items()}
        text = yaml.safe_dump(plain, sort_keys=False)
        (folder / "hparams.yml").write_text(text, encoding="utf-8")

    @property
    def tracker(self) -> Any:
        """TensorBoard's ``SummaryWriter``."""
        return self._board.writer

    writer = tracker

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write one line; the values of a nested dictionary become ``outer/inner``."""
        flat = {name: _to_plain(value) for name, value in flatten(values, "/")}
        self._file.log(flat, step)
        self._board.log(flat, step)

    def finish(self) -> None:
        self._board.finish()


class NamedTracker:
    """A tracker of ours. It starts with the first numbers: until then, a script may resume."""

    def __init__(self, tracker: Background, describe: Callable[[], TrackedRun]) -> None:
        self.name = tracker.name
        self._feed, self._describe = tracker, describe
        self._has_started = False

    def _start(self) -> Background:
        if not self._has_started:
            self._has_started = True
            self._feed.start(self._describe())
        return self._feed

    @property
    def tracker(self) -> Any:
        """The tracker's own run, or a user's object; a blank one if it could not start."""
        has_started = self._start().wait_until_started()
        return getattr(self._feed.tracker, "handle", self._feed.tracker) if has_started else _BLANK

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Pass numbers on; the values of a nested dictionary become ``outer/inner``."""
        flat = {name: _to_plain(value) for name, value in flatten(values, "/")}
        self._start().log(flat, step, **options)

    def finish(self) -> None:
        self._feed.finish()


class TrackingVerbs(ProcessVerbs):
    """The part of ``Accelerator`` that logs; most trackers write on the main process only."""

    project_dir: str | None
    logging_dir: str | None
    _tracker_names: list[str]
    _user_trackers: list[Any]
    _profile: Any
    """How to profile, if the script has said."""
    _trackers: dict[str, Any]
    """Those that were started, by name."""

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start logging to the folders of ``Accelerator(log_with=, project_dir=)``."""
        names, classes = set(self._tracker_names), find_tracker_classes()
        if names & {"tensorboard", "all"} and self.is_main_process:
            logs = str(self.logging_dir)
            run = TrackedRun(name=project_name, settings=config or {}, resume_step=math.inf)
            self._trackers["tensorboard"] = BoardTracker(run, self.project_dir or logs, logs)
        ours = [name for name in self._tracker_names if ":" in name]
        ours += [name for name in list_own_trackers() if names & {name, "all"}]
        plain = [t for t in self._user_trackers if not hasattr(t, "store_init_configuration")]
        if self.is_main_process:
            self._start_own(project_name, config or {}, ours, plain, init_kwargs or {})
        others = [name for name in classes if names & {name, "all"}]
        made = []
        for name in others if self.is_main_process else []:
            build = classes[name]
            options = (init_kwargs or {}).get(build.name, {})
            folders = [self.logging_dir] if build.requires_logging_directory else []
            made.append(build(project_name, *folders, **options))
        for tracker in [*made, *(each for each in self._user_trackers if each not in plain)]:
            if self.is_main_process or not getattr(tracker, "main_process_only", True):
                if hasattr(tracker, "start"):
                    tracker.start()
                if config is not None:
                    tracker.store_init_configuration(dict(config))
                self._trackers[getattr(tracker, "name", type(tracker).__name__)] = tracker

    def _start_own(
        self,
        project: str,
        config: dict[str, Any],
        names: list[str],
        objects: list[Any],
        options: Mapping[str, Any],
    ) -> None:
        def describe() -> TrackedRun:
            folder = Path(self.project_dir) if self.project_dir else None
            return TrackedRun(
                name=folder.resolve().name if folder else project, folder=folder, settings=config,
                resume_step=math.inf if self.engine.checkpoints.resumed_from else 0,
                asked_project=project,
            )  # fmt: skip

        for name in names:
            ours: dict[str, Any] = {"rename": str} if name in OWN else {}
            built = build_tracker(name, **ours, **options.get(name, {}))
            self._trackers[name] = NamedTracker(built, describe)
        for each in objects:
            tracker = Background(each, getattr(each, "name", None))
            self._trackers[tracker.name] = NamedTracker(tracker, describe)

    @property
    def trackers(self) -> list[Any]:
        """Those that ``init_trackers`` has started."""
        return list(self._trackers.values())

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name, or (``unwrap``) what it writes with: TensorBoard's SummaryWriter."""
        if not self._trackers and not self.is_main_process:
            return BlankTracker()
        if name not in self._trackers:
            names = ", ".join(self._trackers)
            hint = f"there is {names}." if names else "call init_trackers() first."
            raise RapidformerError(f"get_tracker({name!r}): {hint}")
        tracker = self._trackers[name]
        return getattr(tracker, "tracker", tracker) if unwrap else tracker

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Pass numbers to the trackers; ``log_kwargs`` has more arguments by a tracker's name."""
        if self.is_main_process and not self._trackers:
            warn_once(
                'accelerator.log() writes nothing: make Accelerator(log_with="tensorboard", '
                "project_dir=...) and call init_trackers() first."
            )
        for name, tracker in self._trackers.items():
            tracker.log(values, step=step, **(log_kwargs or {}).get(name, {}))

    @contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[Any]:
        """torch's profiler, as Accelerate's ``ProfileKwargs`` describe it, or its defaults."""
        asked = profile_handler or self._profile
        with asked.build() if asked is not None else torch.profiler.profile() as profiler:
            yield profiler
        if (folder := getattr(asked, "output_trace_dir", None)) is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(Path(folder) / f"profile_{self.process_index}.json"))
            self.wait_for_everyone()


def _to_plain(value: Any) -> Any:
    """A value as JSON and YAML can hold it; what they cannot hold as text."""
    if isinstance(value, torch.Tensor) or hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
