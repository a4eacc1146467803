"""MLflow. Without a tracking server, the store is a SQLite file in the run's folder."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rapidformer.log import get_logger
from rapidformer.training.trackers.tracker import SentPoints, TrackedRun, keep_numbers, name_plainly

_LONGEST_VALUE = 6000
_LARGEST_BATCH = 100
_FORBIDDEN = re.compile(r"[^0-9A-Za-z_\-. :/]")


class MlflowTracker:
    """One MLflow run, written by its client: a script's own active run stays as it is."""

    has_failed = False

    def __init__(self, rename: Callable[[str], str] = name_plainly, **options: Any) -> None:
        """``options``: experiment_name, run_name, run_id, tags, tracking_uri."""
        is_imported = "mlflow" in sys.modules
        import mlflow

        self._mlflow, self._rename, self._options = mlflow, rename, options
        # A script's active run, which only its own thread knows.
        active = mlflow.active_run() if is_imported else None
        self._active = None if active is None else active.info.run_id
        self._client: Any = None
        self._run_id, self._has_own_store = "", False
        self._sent = SentPoints()

    @property
    def handle(self) -> Any:
        """MLflow's run."""
        return self._client.get_run(self._run_id)

    def start(self, run: TrackedRun) -> None:
        self._client = self._mlflow.MlflowClient(self._find_store(run))
        tags = {**_read_tags(), **self._options.get("tags", {})}
        earlier = run.recall("mlflow") or self._options.get("run_id")
        earlier = earlier or os.environ.get("MLFLOW_RUN_ID")
        if self._active is not None:
            self._run_id = self._active
        elif earlier is not None:
            self._run_id = earlier
            self._client.update_run(earlier, status="RUNNING")
            self._sent = SentPoints(self._find_last_steps())
        else:
            name = self._options.get("run_name") or run.asked_name
            name = name or os.environ.get("MLFLOW_RUN_NAME") or run.name
            begun = self._client.create_run(self._find_experiment(run), run_name=name)
            self._run_id = begun.info.run_id
        run.remember("mlflow", self._run_id)
        for name, value in tags.items():
            self._client.set_tag(self._run_id, name, value)
        self._log_settings(run.settings)
        for values, step in run.read_earlier() if earlier else ():
            self.log({n: v for n, v in values.items() if self._sent.knows(self._rename(n))}, step)

    def _find_store(self, run: TrackedRun) -> str | None:
        asked = self._options.get("tracking_uri")
        if asked or os.environ.get("MLFLOW_TRACKING_URI") or self._mlflow.is_tracking_uri_set():
            return asked
        run.tracker_folder.mkdir(parents=True, exist_ok=True)
        self._has_own_store = True
        # Its own default, ./mlruns, is refused since MLflow 3.13.
        store = f"sqlite:///{(run.tracker_folder / 'mlflow.db').resolve()}"
        get_logger().info(f"mlflow has a file of its own: mlflow ui --backend-store-uri {store}")
        return store

    def _find_experiment(self, run: TrackedRun) -> str:
        name = self._options.get("experiment_name") or run.asked_project
        name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            return str(known.experiment_id)
        place = None
        if self._has_own_store:
            place = (run.tracker_folder / "mlflow").resolve().as_uri()
        return str(self._client.create_experiment(name, artifact_location=place))

    def _find_last_steps(self) -> dict[str, int]:
        names = self._client.get_run(self._run_id).data.metrics
        histories = {name: self._client.get_metric_history(self._run_id, name) for name in names}
        return {name: max(point.step for point in points) for name, points in histories.items()}

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        known = self._client.get_run(self._run_id).data.params  # these cannot be changed
        texts = {_FORBIDDEN.sub("_", name): str(value) for name, value in settings.items()}
        parameters = [
            self._mlflow.entities.Param(name, text)
            for name, text in texts.items()
            if name not in known and len(text) <= _LONGEST_VALUE
        ]
        for first in range(0, len(parameters), _LARGEST_BATCH):
            batch = parameters[first : first + _LARGEST_BATCH]
            self._client.log_batch(self._run_id, params=batch)

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        now = int(time.time() * 1000)
        named = {
            _FORBIDDEN.sub("_", self._rename(name)): value
            for name, value in keep_numbers(values).items()
        }
        metrics = [
            self._mlflow.entities.Metric(name, float(value), now, step or 0)
            for name, value in self._sent.drop_from(named, step).items()
        ]
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self) -> None:
        if self._active is None:
            status = "FAILED" if self.has_failed else "FINISHED"
            self._client.set_terminated(self._run_id, status)


def _read_tags() -> dict[str, str]:
    try:
        return dict(json.loads(os.environ.get("MLFLOW_TAGS") or "{}"))
    except ValueError:
        get_logger().warning("MLFLOW_TAGS is not a JSON object of texts: no tags are set.")
        return {}
