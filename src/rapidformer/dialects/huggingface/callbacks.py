"""transformers' callbacks: their events, with the arguments that they expect.

``TrainerState`` and ``TrainerControl`` are transformers' own classes. Each process has its own
state; what a callback asks for (stop, log, evaluate, save) is the first process's word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.log import warn_once

Callback: TypeAlias = TrainerCallback | type[TrainerCallback]


class CallbackList:
    """The callbacks of a trainer, called in the order in which they were added."""

    def __init__(self, trainer: TrainerInterface, callbacks: list[Callback]) -> None:
        self._trainer = trainer
        self.callbacks: list[TrainerCallback] = []
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Callback) -> None:
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def pop(self, callback: Callback) -> TrainerCallback | None:
        """Take one out, by itself or by its class."""
        for each in self.callbacks:
            if each is callback or (isinstance(callback, type) and isinstance(each, callback)):
                self.callbacks.remove(each)
                return each
        return None

    def call(self, event: str, **details: Any) -> TrainerControl:
        """Tell every callback; one that returns a control object replaces the trainer's."""
        trainer = self._trainer
        for callback in self.callbacks:
            returned = getattr(callback, event)(
                trainer.args,
                trainer.state,
                trainer.control,
                model=trainer.model,
                processing_class=trainer.processing_class,
                optimizer=trainer.optimizer,
                lr_scheduler=trainer.lr_scheduler,
                train_dataloader=trainer.train_dataloader,
                **{"eval_dataloader": None, **details},
            )
            if returned is not None:
                trainer.control = returned
        return trainer.control

    def list_events(self) -> set[str]:
        """The events that at least one callback listens to."""
        names = [name for name in vars(TrainerCallback) if name.startswith("on_")]
        return {
            name
            for name in names
            for callback in self.callbacks
            if getattr(getattr(callback, name), "__func__", None)
            is not getattr(TrainerCallback, name)
        }

    def on_prediction_step(self, loader: Any) -> None:
        self.call("on_prediction_step", eval_dataloader=loader)


def build_reporting_callbacks(report_to: Any) -> list[Callback]:
    """transformers' integrations (wandb, mlflow, tensorboard ...) by their names."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    names = [name for name in names if name not in ("none", "")]
    if not names:
        return []
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    found: list[Callback] = get_reporting_integration_callbacks(names)
    return found


def build_state(trainer: TrainerInterface) -> TrainerState:
    """The state of a run that starts."""
    args = trainer.args
    return TrainerState(
        is_local_process_zero=args.local_process_index == 0,
        is_world_process_zero=args.process_index == 0,
        stateful_callbacks=_list_stateful(trainer),  # type: ignore[arg-type]
    )


def update_stateful(trainer: TrainerInterface) -> None:
    """Take the present state of the callbacks into the trainer's, before it is saved."""
    collected = TrainerState(stateful_callbacks=_list_stateful(trainer))  # type: ignore[arg-type]
    trainer.state.stateful_callbacks = collected.stateful_callbacks


def restore_stateful(trainer: TrainerInterface, saved: Mapping[str, Any]) -> None:
    """Give the callbacks the state of a checkpoint: each stays the object that it is."""
    remaining = {
        name: list(states) if isinstance(states, list) else [states]
        for name, states in saved.items()
    }
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
    each = [*trainer.callbacks.callbacks, trainer.control]
    return [one for one in each if isinstance(one, ExportableState)]
