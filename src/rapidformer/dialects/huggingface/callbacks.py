"""transformers' callbacks: their events and arguments."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState

from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.dialects.huggingface.names import list_reports
from rapidformer.log import warn_once
from rapidformer.training.trackers import Background, TrackedRun
from rapidformer.training.trackers.build import OWN, build_tracker

Callback: TypeAlias = TrainerCallback | type[TrainerCallback]
# What every event passes to a callback, by name.
_SHOWN = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader")


class CallbackList(CallbackHandler):
    """transformers' list of callbacks, which shows them what the trainer has now."""

    eval_dataloader: Any = None

    def __init__(self, trainer: TrainerInterface, callbacks: list[Callback]) -> None:
        # Not the constructor above: it keeps copies, and asks for a callback that runs the loop.
        self._trainer = trainer
        self.callbacks: list[TrainerCallback] = []
        for callback in callbacks:
            self.add_callback(callback)

    def __getattr__(self, name: str) -> Any:
        if name not in _SHOWN:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._trainer, name)

    def call(self, event: str, *, eval_dataloader: Any = None, **details: Any) -> None:
        """Tell every callback; one that returns a control object replaces the trainer's."""
        trainer, self.eval_dataloader = self._trainer, eval_dataloader
        trainer.control = getattr(self, event)(
            trainer.args, trainer.state, trainer.control, **details
        )

    def list_events(self) -> set[str]:
        """The events that at least one callback listens to."""
        return {
            name
            for name, idle in vars(TrainerCallback).items()
            for callback in self.callbacks
            if name.startswith("on_")
            and getattr(getattr(callback, name), "__func__", None) is not idle
        }


def build_reporting_callbacks(report_to: str | list[str]) -> list[Callback]:
    """Our trackers (wandb, mlflow, trackio, a user's) by their names, and transformers' own."""
    names = list_reports(report_to)
    ours = [name for name in names if name in OWN or ":" in name]
    callbacks: list[Callback] = [TrackerCallback(name) for name in ours]
    if others := [name for name in names if name not in ours]:
        from transformers.integrations.integration_utils import get_reporting_integration_callbacks

        callbacks += get_reporting_integration_callbacks(others)
    return callbacks


class TrackerCallback(TrainerCallback):
    """Gives the numbers to one of our trackers, which goes on in the same run after a resume."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tracker: Background | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        self._finish()
        if state.is_world_process_zero:
            self._tracker = self._start(args, state, details.get("model"))
            atexit.register(self._finish)  # evaluate() after train() reports, too

    def _start(self, args: Any, state: Any, model: Any) -> Background:
        options = {}
        if self._name == "trackio":
            asked = {"space_id": args.trackio_space_id, "bucket_id": args.trackio_bucket_id}
            options = {name: value for name, value in asked.items() if value is not None}
        tracker = build_tracker(self._name, **options)
        folder, default = Path(args.output_dir or "."), type(args).project
        project = None if args.project == default else args.project
        config: Any = getattr(model, "config", None)
        facts = config.to_dict() if hasattr(config, "to_dict") else {}
        run = TrackedRun(
            name=args.run_name or folder.resolve().name, folder=folder,
            settings={**facts, **args.to_dict()}, resume_step=state.global_step, project=default,
            asked_name=args.run_name, asked_project=project,
        )  # fmt: skip
        tracker.start(run)
        return tracker

    def on_log(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        if self._tracker is None and state.is_world_process_zero:
            self.on_train_begin(args, state, control, **details)
        if self._tracker is not None:
            self._tracker.log(dict(details["logs"]), state.global_step)

    def _finish(self) -> None:
        if self._tracker is not None:
            self._tracker.finish()
            self._tracker = None


def build_state(trainer: TrainerInterface) -> TrainerState:
    """The state of a run that starts, with that of the callbacks."""
    args = trainer.args
    return TrainerState(
        is_local_process_zero=args.local_process_index == 0,
        is_world_process_zero=args.process_index == 0,
        stateful_callbacks=_list_stateful(trainer),
    )


def restore_stateful(trainer: TrainerInterface, saved: Mapping[str, Any]) -> None:
    """Give the callbacks the state of a checkpoint: each stays the object that it is."""
    remaining = {n: list(s) if isinstance(s, list) else [s] for n, s in saved.items()}
    for callback in _list_stateful(trainer):
        states = remaining.get(type(callback).__name__)
        if states:
            restored: Any = type(callback).from_state(states.pop(0))
            vars(callback).update(vars(restored))
    missing = sorted(name for name, states in remaining.items() if states)
    if missing:
        warn_once(
            f"the checkpoint has the state of {', '.join(missing)}, but the Trainer has no such "
            "callback: pass the same callbacks as before."
        )


def _list_stateful(trainer: TrainerInterface) -> list[ExportableState]:
    holders = [*trainer.callbacks.callbacks, trainer.control]
    return [holder for holder in holders if isinstance(holder, ExportableState)]
