"""What the one loop tells a trainer's callbacks, and what they ask of it.

As in transformers, ``evaluate()`` itself tells the callbacks of an evaluation, before the loop has
compared it with the best one; here the result is only copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rapidformer.dialects.huggingface.callbacks import build_state, restore_stateful
from rapidformer.dialects.huggingface.evaluating import EvaluationMethods
from rapidformer.dialects.huggingface.records import (
    STATE_FILE,
    lift_model,
    link_checkpoint,
    list_weights,
)
from rapidformer.dist.collectives import gather_from_all, max_over_all
from rapidformer.log import warn_once
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from rapidformer.training.timetable import count_updates

REQUESTS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate",
             "should_save")  # fmt: skip
_STOPS = REQUESTS[:2]
# The loop acts on requests of these only at the end of the step.
_WITHIN_STEP = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
# What transformers logs of a training interval, by our names.
_LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
_LATEST = ("grad_norm", "learning_rate")
"""Of these, a line shows the last value and not the mean."""


def _copy_requests(source: Any, target: Any) -> None:
    for name in REQUESTS:
        setattr(target, name, getattr(source, name))


def _pass_on(event: str) -> Any:
    """A hook that tells the callbacks of the event with its name."""

    def hook(self: LoopEvents, loop: RunningLoop, control: Control) -> None:
        self._tell(event, loop, control)

    return hook


class Unlogged:
    """The numbers of the updates that no line of the history shows yet.

    The loop also measures before it evaluates and saves; transformers logs only when it is due.
    """

    def __init__(self, step: int) -> None:
        self._since = self.step = step
        self.line: dict[str, float] = {}

    def add(self, line: Mapping[str, float], step: int) -> None:
        """Take in the means over the updates since the last call."""
        updates = max(step - self.step, 1)
        share = updates / max(step - self._since, updates)
        for name, value in line.items():
            if name in self.line and name not in _LATEST:
                value = self.line[name] * (1 - share) + value * share
            self.line[name] = value
        self.step = step

    def take(self) -> dict[str, float]:
        """The line of all of them, which is shown now."""
        line, self.line, self._since = self.line, {}, self.step
        return line


class LoopEvents(Callback):
    """Tells a trainer's callbacks what the loop does, and the loop what they ask for."""

    def __init__(self, trainer: EvaluationMethods) -> None:
        self._trainer = trainer
        self._heard: set[str] = set()
        self._wishes: dict[str, bool] = {}
        """What callbacks of this rank asked for or took back, and the others do not know yet."""
        self._work_before = 0.0
        self._tokens_before = 0
        self._saved = trainer.state
        """That of the last checkpoint."""
        self._unlogged, self._is_log_due = Unlogged(0), False
        self.has_begun = False

    def hears(self, hook: str) -> bool:
        return hook in self._heard

    def on_train_begin(self, loop: RunningLoop, control: Control) -> None:
        trainer, args = self._trainer, self._trainer.args
        state = trainer.state
        state.max_steps = loop.train_iters
        state.num_train_epochs = math.ceil(args.num_train_epochs)
        if args.max_steps > 0:
            length = trainer.train_dataloader.updates_per_epoch  # of a stream unknown: 0
            state.num_train_epochs = -(-args.max_steps // length) if length else sys.maxsize
        trainer.counted_work = 0.0
        state.train_batch_size = args.train_batch_size
        for name in ("logging_steps", "eval_steps", "save_steps"):
            interval = getattr(args, name)
            if interval:
                setattr(state, name, count_updates(interval, loop.train_iters))
        self.has_begun = True
        self._unlogged = Unlogged(loop.step)
        if loop.step:
            self.recall(loop.step, loop.args.save)
        # A callback may be on some ranks only: all must know where requests can come from.
        self._heard = set().union(*gather_from_all(trainer.callbacks.list_events()))
        # They must see the weights of the checkpoint.
        loop.saves_at_once = self.hears("on_save") or trainer.overrides("save_model")
        self._tell("on_train_begin", loop, control)

    def recall(self, step: int, save: str | None) -> None:
        """The history of the run that is resumed, and the state of its callbacks if asked for."""
        trainer = self._trainer
        checkpoint = trainer.engine.checkpoints.resumed_from
        for folder in (checkpoint, Path(save or ".")):
            if folder is None or not (folder / STATE_FILE).is_file():
                continue
            with contextlib.suppress(OSError, ValueError, KeyError):
                saved = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
                history = [line for line in saved["log_history"] if line["step"] <= step]
                trainer.state.log_history = history
                self._work_before = float(saved.get("total_flos", 0))
                self._tokens_before = int(saved.get("num_input_tokens_seen", 0))
                trainer.state.num_input_tokens_seen = self._tokens_before
                if trainer.args.restore_callback_states_from_checkpoint and folder == checkpoint:
                    restore_stateful(trainer, saved.get("stateful_callbacks", {}))
                return

    on_epoch_begin = _pass_on("on_epoch_begin")
    on_step_begin = _pass_on("on_step_begin")
    on_substep_end = _pass_on("on_substep_end")
    on_optimizer_step = _pass_on("on_optimizer_step")

    def on_pre_optimizer_step(self, loop: RunningLoop, control: Control) -> None:
        """Callbacks see, and may change, the gradient as it is after clipping."""
        looks = self.hears("on_pre_optimizer_step") or self.hears("on_optimizer_step")
        if looks and loop.args.clip_grad > 0:
            loop.engine.clip_grad_norm()
        self._tell("on_pre_optimizer_step", loop, control)

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        """The loop evaluates and saves at the end in any case: callbacks see it coming."""
        self._count_tokens(loop)
        if loop.step >= loop.train_iters:
            self._ask_for(loop, control, "steps", loop.step)
        self._tell("on_step_end", loop, control)
        self._is_log_due = control.should_log

    def on_epoch_end(self, loop: RunningLoop, control: Control) -> None:
        """Also of an epoch that the run has not finished."""
        control.should_log |= loop.args.log_strategy == "epoch"
        self._ask_for(loop, control, "epoch", loop.epoch)
        self._tell("on_epoch_end", loop, control)
        self._is_log_due = control.should_log
        if self._is_log_due and self._unlogged.line and self._unlogged.step == loop.step:
            self._log(loop, control)  # the loop has measured all before an evaluation

    def _ask_for(self, loop: RunningLoop, control: Control, strategy: str, place: float) -> None:
        args = loop.args
        control.should_save |= args.save_strategy == strategy
        is_due = loop.progress.evaluated_at != loop.step and args.eval_delay <= place
        control.should_evaluate |= args.eval_strategy == strategy and is_due

    def on_train_end(self, loop: RunningLoop, control: Control) -> None:
        self._follow(loop)
        self._count_work(loop)
        self._trainer.log_results({**self._unlogged.line, "step": self._unlogged.step})
        self._tell("on_train_end", loop, control)

    def _count_tokens(self, loop: RunningLoop) -> None:
        asked = self._trainer.args.include_num_input_tokens_seen
        if asked != "no":
            seen = sum(gather_from_all(loop.slots if asked == "all" else loop.tokens))
            self._trainer.state.num_input_tokens_seen = self._tokens_before + seen

    def _count_work(self, loop: RunningLoop) -> None:
        """transformers' estimate for the tokens of all processes, padding included."""
        if self._trainer.overrides("floating_point_ops"):  # it may look at the shape of a batch
            work = sum(gather_from_all(self._trainer.counted_work))
        else:
            name = getattr(self._trainer.model, "main_input_name", "input_ids")
            slots = torch.empty(sum(gather_from_all(loop.slots)), device="meta")
            work = self._trainer.floating_point_ops({name: slots})
        self._trainer.state.total_flos = self._work_before + work

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        if "loss" in line:  # evaluate() logs its own numbers
            logged = {_LOGGED[name]: line[name] for name in _LOGGED if name in line}
            self._unlogged.add({**logged, **loop.parts}, loop.step)
            if self._is_log_due:
                self._log(loop, control)

    def _log(self, loop: RunningLoop, control: Control) -> None:
        with self._asking(loop, control, "on_log"):
            self._trainer.log(self._unlogged.take())

    def on_evaluate(self, loop: RunningLoop, control: Control, metrics: dict[str, float]) -> None:
        """Copy the comparison, and what the callbacks asked for when ``evaluate`` called them."""
        self._follow(loop)
        if loop.step:
            self._trainer.step_schedule(metrics)
        for name in REQUESTS:
            if getattr(self._trainer.control, name) and not getattr(control, name):
                self._wishes[name] = True
        self._agree(control)

    def on_pre_save(self, loop: RunningLoop, control: Control) -> None:
        """Training may be further when the checkpoint is complete."""
        self._follow(loop)
        self._count_work(loop)
        state = self._trainer.state
        state.stateful_callbacks = build_state(self._trainer).stateful_callbacks
        self._saved = dataclasses.replace(state, log_history=[*state.log_history])

    def on_save(self, loop: RunningLoop, control: Control, folder: Path) -> None:
        trainer = self._trainer
        if trainer.overrides("save_model"):  # its own way is part of each checkpoint
            trainer.save_model(str(folder), _internal_call=True)
        if trainer.state.is_world_process_zero:
            link_checkpoint(folder, self._saved.global_step)
            lift_model(folder)
            self._saved.save_to_json(str(folder / STATE_FILE))
        trainer.save_state()
        sizes = list_weights(folder)
        self._tell("on_save", loop, control)
        if list_weights(folder) != sizes:
            warn_once(
                f"a callback has written over the weights in {folder.name}, so that checkpoint "
                "cannot be resumed: it holds what from_pretrained reads already. Save other models "
                "into another folder."
            )

    def _tell(self, event: str, loop: RunningLoop, control: Control) -> None:
        if event == "on_step_end":
            sources: tuple[str, ...] = (event, *_WITHIN_STEP)
        else:
            sources = () if event in _WITHIN_STEP else (event,)
        # The update counts, for callbacks and for what is logged in it, when it is complete.
        with self._asking(None if event in _WITHIN_STEP else loop, control, *sources):
            self._trainer.callbacks.call(event)

    @contextlib.contextmanager
    def _asking(self, loop: RunningLoop | None, control: Control, *events: str) -> Iterator[None]:
        """Callbacks may ask for things, and may take back what the settings ask for."""
        if loop is not None:
            self._follow(loop)
        theirs = self._trainer.control
        _copy_requests(control, theirs)
        for name, value in self._wishes.items():
            setattr(theirs, name, value)
        before = {name: getattr(theirs, name) for name in REQUESTS}
        yield
        for name in REQUESTS:
            value = getattr(theirs, name)
            if value == before[name]:
                continue
            if value or events or name in _STOPS:
                self._wishes[name] = value
            else:  # all ranks begin a step without what was due before it
                self._wishes.pop(name, None)
                setattr(control, name, False)
        if self._heard.intersection(events):
            self._agree(control)
        elif events:
            _copy_requests(theirs, control)
            self._wishes = {}  # nobody was told, so every rank has the same

    def _agree(self, control: Control) -> None:
        """What callbacks of any rank asked for counts on all; if they differ, the first rank's."""
        args = self._trainer.args
        weight = 2 * (args.world_size - args.process_index)
        mine = [weight + self._wishes[name] if name in self._wishes else 0 for name in REQUESTS]
        for name, answer in zip(REQUESTS, max_over_all(mine), strict=True):
            if answer:
                setattr(control, name, answer % 2 == 1)
        self._wishes = {}

    def _follow(self, loop: RunningLoop) -> None:
        state, progress = self._trainer.state, loop.progress
        state.global_step, state.epoch = loop.step, loop.epoch
        args = self._trainer.args
        is_asked = args.metric_for_best_model is not None or args.save_strategy == "best"
        if is_asked and progress.best_step is not None:
            state.best_metric, state.best_global_step = progress.best_value, progress.best_step
            link = Path(loop.args.save or ".") / f"checkpoint-{progress.best_step}"
            state.best_model_checkpoint = str(link) if link.exists() else None
