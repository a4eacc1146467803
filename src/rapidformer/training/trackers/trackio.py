"""Trackio: a local SQLite file, or a Space on the Hub if ``TRACKIO_SPACE_ID`` names one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rapidformer.training.trackers.tracker import SentPoints, TrackedRun, name_by_phase


class TrackioTracker:
    """One Trackio run; a resumed run continues it."""

    def __init__(self, rename: Callable[[str], str] = name_by_phase, **options: Any) -> None:
        """``options`` go to ``trackio.init``."""
        import trackio

        self._trackio, self._rename, self._options = trackio, rename, options
        self.handle: Any = None
        """Trackio's run."""
        self._sent = SentPoints()

    def start(self, run: TrackedRun) -> None:
        earlier = run.recall("trackio")
        name = earlier or run.asked_name or run.name
        options = {"project": run.asked_project or run.project, "name": name, **self._options}
        options.setdefault("resume", "never" if earlier is None else "allow")
        config = {key.lstrip("_"): value for key, value in run.settings.items()}
        self.handle = self._trackio.init(config=config, **options)
        run.remember("trackio", self.handle.name)
        if earlier is not None:
            self._sent = SentPoints(self._find_last_steps(options["project"]))
            for values, step in run.read_earlier():
                known = {n: v for n, v in values.items() if self._sent.knows(self._rename(n))}
                self.log(known, step)

    def _find_last_steps(self, project: str) -> dict[str, int]:
        rows = self._trackio.SQLiteStorage.get_logs(
            project, self.handle.name, run_id=self.handle.id
        )
        last: dict[str, int] = {}
        for row in rows:
            last |= {name: max(int(row["step"]), last.get(name, 0)) for name in row}
        return last

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        named = {self._rename(name): value for name, value in values.items()}
        if self._rename is name_by_phase:
            named["train/global_step"] = step
        if new := self._sent.drop_from(named, step):
            self.handle.log(new, step=step)

    def finish(self) -> None:
        self.handle.finish()
