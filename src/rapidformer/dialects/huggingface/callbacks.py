"""transformers' callbacks: their events and arguments. The first process's word counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState

from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.dialects.huggingface.names import list_reports
from rapidformer.log import warn_once

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
    """transformers' integrations (wandb, mlflow, tensorboard ...) by their names."""
    names = list_reports(report_to)
    if not names:
        return []
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    callbacks: list[Callback] = get_reporting_integration_callbacks(names)
    return callbacks


def build_state(trainer: TrainerInterface) -> TrainerState:
    """The state of a run that starts."""
    args = trainer.args
    return TrainerState(
        is_local_process_zero=args.local_process_index == 0,
        is_world_process_zero=args.process_index == 0,
        stateful_callbacks=_list_stateful(trainer),
    )


def update_stateful(trainer: TrainerInterface) -> None:
    """Take the present state of the callbacks into the trainer's, before it is saved."""
    collected = TrainerState(stateful_callbacks=_list_stateful(trainer))
    trainer.state.stateful_callbacks = collected.stateful_callbacks


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
