"""The loop's hook points as transformers' events: the trainer's state follows the loop's.

As in transformers, ``evaluate()`` itself tells the callbacks of an evaluation, before the loop has
compared it with the best one; here the result is only copied.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from rapidformer.dialects.huggingface.callbacks import restore_stateful, update_stateful
from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.dialects.huggingface.records import STATE_FILE
from rapidformer.dist.collectives import broadcast_object, gather_from_all
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from rapidformer.training.timetable import count_updates

_REQUESTS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate",
             "should_save")  # fmt: skip
# The loop acts on requests of these only at the end of the step.
_WITHIN_STEP = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
# What transformers logs of a training interval, by our names.
_LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}


def forget_requests(control: Any) -> None:
    """Before ``evaluate`` calls the callbacks: what the loop has planned is not their wish."""
    for name in _REQUESTS[1:]:
        setattr(control, name, False)


class LoopEvents(Callback):
    """Tells a trainer's callbacks what the loop does, and the loop what they ask for."""

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer
        self._heard: set[str] = set()

    def hears(self, hook: str) -> bool:
        return hook in self._heard

    def on_train_begin(self, loop: RunningLoop, control: Control) -> None:
        trainer, args = self._trainer, self._trainer.args
        state = trainer.state
        state.max_steps = loop.train_iters
        state.num_train_epochs = int(-(-args.num_train_epochs // 1))
        state.train_batch_size = args.train_batch_size
        for name in ("logging_steps", "eval_steps", "save_steps"):
            interval = getattr(args, name)
            if interval:
                setattr(state, name, count_updates(interval, loop.train_iters))
        if loop.step:
            self._recall(loop)
        # A callback may be on some ranks only: all must know where requests can come from.
        self._heard = set().union(*gather_from_all(trainer.callbacks.list_events()))
        self._tell("on_train_begin", loop, control)

    def _recall(self, loop: RunningLoop) -> None:
        """The history of the run that is resumed, and the state of its callbacks if asked for."""
        trainer = self._trainer
        checkpoint = trainer.engine.checkpoints.resumed_from
        for folder in (checkpoint, Path(loop.args.save or ".")):
            if folder is None or not (folder / STATE_FILE).is_file():
                continue
            with contextlib.suppress(OSError, ValueError, KeyError):
                saved = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
                history = [line for line in saved["log_history"] if line["step"] <= loop.step]
                trainer.state.log_history = history
                if trainer.args.restore_callback_states_from_checkpoint and folder == checkpoint:
                    restore_stateful(trainer, saved.get("stateful_callbacks", {}))
                return

    def on_epoch_begin(self, loop: RunningLoop, control: Control) -> None:
        self._tell("on_epoch_begin", loop, control)

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        self._tell("on_step_begin", loop, control)

    def on_substep_end(self, loop: RunningLoop, control: Control) -> None:
        self._tell("on_substep_end", loop, control)

    def on_pre_optimizer_step(self, loop: RunningLoop, control: Control) -> None:
        self._tell("on_pre_optimizer_step", loop, control)

    def on_optimizer_step(self, loop: RunningLoop, control: Control) -> None:
        self._tell("on_optimizer_step", loop, control)

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        self._tell("on_step_end", loop, control)

    def on_epoch_end(self, loop: RunningLoop, control: Control) -> None:
        self._tell("on_epoch_end", loop, control)

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        if "loss" in line:  # evaluate() logs its own numbers
            self._follow(loop)
            self._read(control)
            self._trainer.log({_LOGGED[name]: line[name] for name in _LOGGED if name in line})
            self._pass_on(control)
            self._agree(control, "on_log")

    def on_evaluate(self, loop: RunningLoop, control: Control, metrics: dict[str, float]) -> None:
        """Copy the comparison, and what the callbacks asked for when ``evaluate`` called them."""
        self._follow(loop)
        theirs = self._trainer.control
        for name in _REQUESTS:
            setattr(control, name, getattr(control, name) or getattr(theirs, name))
        self._agree(control, "on_evaluate", "on_log", "on_prediction_step")

    def on_save(self, loop: RunningLoop, control: Control, folder: Path) -> None:
        trainer = self._trainer
        update_stateful(trainer)
        if trainer.state.is_world_process_zero:
            _link_checkpoint(folder, loop.step)
            trainer.state.save_to_json(str(folder / STATE_FILE))
        trainer.save_state()
        self._tell("on_save", loop, control)

    def on_train_end(self, loop: RunningLoop, control: Control) -> None:
        self._tell("on_train_end", loop, control)

    def _tell(self, event: str, loop: RunningLoop, control: Control) -> None:
        self._follow(loop)
        self._read(control)
        self._trainer.callbacks.call(event)
        self._pass_on(control)
        if event == "on_step_end":
            self._agree(control, event, *_WITHIN_STEP)
        elif event not in _WITHIN_STEP:
            self._agree(control, event)

    def _agree(self, control: Control, *events: str) -> None:
        """Rank 0's requests count; nothing is sent if no callback listens to these events."""
        if self._heard.intersection(events):
            requests = broadcast_object([getattr(control, name) for name in _REQUESTS])
            for name, value in zip(_REQUESTS, requests, strict=True):
                setattr(control, name, value)

    def _read(self, control: Control) -> None:
        theirs = self._trainer.control
        for name in _REQUESTS:
            setattr(theirs, name, getattr(control, name))

    def _pass_on(self, control: Control) -> None:
        """What the callbacks ask of the loop; a request of the settings may be taken back too."""
        theirs = self._trainer.control
        for name in _REQUESTS:
            setattr(control, name, getattr(theirs, name))

    def _follow(self, loop: RunningLoop) -> None:
        state, progress = self._trainer.state, loop.progress
        state.global_step, state.epoch = loop.step, loop.epoch
        if progress.best_step is not None:
            state.best_metric, state.best_global_step = progress.best_value, progress.best_step
            link = Path(loop.args.save or ".") / f"checkpoint-{progress.best_step}"
            state.best_model_checkpoint = str(link)


def _link_checkpoint(folder: Path, step: int) -> None:
    """``checkpoint-500`` next to ``iter_0000500``: the name that scripts look for."""
    for link in folder.parent.glob("checkpoint-*"):
        if link.is_symlink() and not link.exists():
            link.unlink()  # its checkpoint has been removed
    with contextlib.suppress(OSError):  # a file system without links
        (folder.parent / f"checkpoint-{step}").symlink_to(folder.name)
