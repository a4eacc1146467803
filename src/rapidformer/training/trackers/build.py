"""The trackers that ``--report-to`` names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rapidformer.config.tracker_names import TRACKERS, list_named
from rapidformer.errors import ConfigurationError
from rapidformer.training.trackers.background import Background
from rapidformer.training.trackers.integrations import Integration
from rapidformer.training.trackers.mlflow import MlflowTracker
from rapidformer.training.trackers.tracker import Tracker
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
