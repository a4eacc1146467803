"""A task's training with the user's data sets, metrics and (transformers') callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.data.sources import load_splits
from rapidformer.dialects.huggingface.bridge import LoopEvents
from rapidformer.dialects.huggingface.evaluating import run_evaluation
from rapidformer.engine import RapidformerEngine
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.runner import TaskFinetuner
from rapidformer.training.callbacks import Control, RunningLoop


class TaskEvents(LoopEvents):
    """The events of a task's run, in which the loop itself evaluates."""

    def on_train_begin(self, loop: RunningLoop, control: Control) -> None:
        self._trainer.optimizer = loop.engine.updates.optimizer
        self._trainer.lr_scheduler = loop.engine.updates.lr_scheduler
        super().on_train_begin(loop, control)

    def on_evaluate(self, loop: RunningLoop, control: Control, metrics: dict[str, float]) -> None:
        with self._asking(loop, control, "on_evaluate", "on_log"):
            self._trainer.log(dict(metrics))
            self._trainer.callbacks.call("on_evaluate", metrics=dict(metrics))


class GivenTask(TaskFinetuner):
    """A task whose splits may be data sets, and whose run may have callbacks and metrics."""

    def __init__(self, engine: RapidformerEngine, settings: Settings, trainer: Any) -> None:
        super().__init__(engine, get_task(settings.task or ""))
        self._trainer = trainer
        splits = (("train", trainer.train_dataset), ("validation", trainer.eval_dataset))
        self._given = {n: data for n, data in splits if data is not None and not is_path(data)}

    def prepare_data(self) -> Any:
        if not self._given:
            return super().prepare_data()
        has_paths = bool(self.args.train_data or self.args.valid_data)
        read = load_splits(self.args) if has_paths else {}
        return self.task.prepare(self.args, {**read, **self._given})

    def compose(self) -> Any:
        model = super().compose()
        if self._trainer.has_hooks:
            self._trainer.adopt_task(self.engine, model, self.processor)
            self.callbacks = [TaskEvents(self._trainer)]
        return model

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        metrics = super().run_compute_metrics(model, eval_dataloader)
        return {**metrics, **measure_own(self._trainer, eval_dataloader)}


def measure_own(trainer: Any, loader: Any) -> dict[str, float]:
    """What the trainer's ``compute_metrics``, if it has one, says of a loader's data."""
    if trainer.compute_metrics is None:
        return {}
    output = run_evaluation(trainer, loader, loss_only=False, ignore_keys=None, prefix="eval")
    metrics = {name.removeprefix("eval_"): value for name, value in (output.metrics or {}).items()}
    metrics.pop("loss", None)  # the task's own is the same
    return metrics


def is_path(data: Any) -> bool:
    """Whether data is given as a file or folder."""
    return isinstance(data, (str, Path))
