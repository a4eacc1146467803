"""The trackers that ``--report-to`` names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rapidformer.config.tracker_names import TRACKERS, list_named
from rapidformer.errors import ConfigurationError
from rapidformer.training.trackers.background import Background
from rapidformer.training.trackers.mlflow import MlflowTracker
from rapidformer.training.trackers.tracker import TrackedRun, Tracker, keep_numbers, name_plainly
from rapidformer.training.trackers.trackio import TrackioTracker
from rapidformer.training.trackers.wandb import WandbTracker

OWN: dict[str, Callable[..., Any]] = {
    "wandb": WandbTracker, "mlflow": MlflowTracker, "trackio": TrackioTracker,
}  # fmt: skip


def build_trackers(names: list[str] | None) -> list[Tracker]:
    """One for each name but TensorBoard's, which is not a thread's work."""
    return [build_tracker(name) for name in list_named(names) if name != "tensorboard"]


def build_tracker(name: str, **options: Any) -> Background:
    """A tracker by name, or a user's class as ``module:Class``, in a thread of its own."""
    if name in OWN:
        return Background(OWN[name](**options), name)
    return Background(Integration(name) if name in TRACKERS else _import(name)(**options), name)


def _import(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:  # as for a script in this folder
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as reason:  # the user's module may raise anything
        raise ConfigurationError(f"--report-to {name} cannot be imported: {reason}.") from None
    missing = [verb for verb in ("start", "log", "finish") if not hasattr(found, verb)]
    if missing:
        raise ConfigurationError(
            f"--report-to {name}: the class has no {' and no '.join(missing)}(); a tracker has "
            "start(run), log(values, step) and finish()."
        )
    return found


class Integration:
    """Calls a callback of transformers as its own training loop would."""

    def __init__(self, name: str) -> None:
        from transformers import TrainerControl, TrainerState
        from transformers.integrations.integration_utils import get_reporting_integration_callbacks

        [build] = get_reporting_integration_callbacks([name])
        self._callback = build()
        self._state = TrainerState(is_local_process_zero=True, is_world_process_zero=True)
        self._control = TrainerControl()
        self._arguments: Any = None

    def start(self, run: TrackedRun) -> None:
        settings = {name: value for name, value in run.settings.items() if value is not None}
        plain = {n: v if isinstance(v, (bool, int, float)) else str(v) for n, v in settings.items()}
        self._arguments = SimpleNamespace(
            output_dir=str(run.folder or "."), run_name=run.asked_name or run.name,
            project=run.asked_project or run.project, resume_from_checkpoint=bool(run.resume_step),
            to_dict=lambda: dict(settings), to_sanitized_dict=lambda: plain,
            load_best_model_at_end=False, metric_for_best_model=None, greater_is_better=None,
            save_total_limit=None,
        )  # fmt: skip
        self._tell("on_train_begin")

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        self._state.global_step = step or 0
        self._state.epoch = values.get("epoch", self._state.epoch)
        logs = {name_plainly(name): value for name, value in keep_numbers(values).items()}
        self._tell("on_log", logs=logs)

    def finish(self) -> None:
        self._tell("on_train_end")

    def _tell(self, event: str, **details: Any) -> None:
        getattr(self._callback, event)(self._arguments, self._state, self._control, **details)
