"""Run black-box tasks on the training loop: train from settings alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from rapidformer.data.loader import DistributedLoader
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import DataError
from rapidformer.log import warn, warn_once
from rapidformer.objectives import BoundObjective, Objective
from rapidformer.objectives.objective import AskedModel
from rapidformer.tasks.base import PreparedData, Task
from rapidformer.tasks.evaluation.evaluating import add_context, compose_frozen_models, measure
from rapidformer.tasks.evaluation.samples import SampleAnswers, describe_tables, generate_samples
from rapidformer.tasks.mixture import prepare_data
from rapidformer.tasks.registry import describe_unused_flags, get_task
from rapidformer.training.evaluation import Metrics
from rapidformer.training.finetuner import Finetuner


class TaskFinetuner(Finetuner):
    """A Finetuner whose hooks come from a task."""

    prepared: PreparedData

    def __init__(
        self, engine: RapidformerEngine, task: Task, splits: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(engine)
        self.task, self.splits = task, splits
        self.has_shifted_labels = task.has_shifted_labels
        self.smooths_labels = task.smooths_labels
        self.uses_dropout = task.uses_dropout

    def train_valid_test_datasets_provider(self) -> tuple[Any, Any, Any, Any]:
        prepared = self.prepare_data()
        if prepared.train is None:
            raise DataError(
                "the data has no training split: name a file train.…, or use --train-data."
            )
        self.prepared = prepared
        self.processor = prepared.saved or prepared.processor
        self.best_metric, self.greater_is_better = self.task.get_best_metric(prepared)
        validation = prepared.validation if prepared.is_labelled("validation") else None
        if validation is None:
            remedy = "--validation-split 0.1 holds out rows for validation."
            if not hasattr(prepared.train, "__len__"):
                remedy = "--valid-data FILE names one."
            warn(
                "there is no labelled validation split: the model is not evaluated, and only the "
                f"last one is saved. {remedy}"
            )
        return prepared.train, validation, prepared.test, prepared.collate

    def prepare_data(self) -> PreparedData:
        """The splits that were given or that the settings name, ready for the model."""
        return prepare_data(self.task, self.args, self.splits)

    def model_optimizer_lr_scheduler_provider(self) -> tuple[Any, Any, Any]:
        return self.task.build_model(self.args, self.prepared), None, None

    def build_objective(self) -> Objective:
        return self.prepared.objective or self.task.build_objective(self.args)

    def provide_frozen_models(self) -> Mapping[str, nn.Module | AskedModel]:
        return compose_frozen_models(self.engine, self.task, self.prepared)

    def make_forward(self, model: Any) -> BoundObjective:
        forward = super().make_forward(model)
        self.prepared = add_context(self.prepared, forward.context)
        return forward

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        return self._measure(model[0], eval_dataloader, "validation")

    def make_test(self, model: Any, dataset: Any, collate: Any) -> Callable[[], Metrics] | None:
        """On test data with labels alone: some published test sets have none."""
        loader = self.build_eval_loader(dataset, collate)
        if loader is None or not self.prepared.is_labelled("test"):
            return None
        return lambda: self._measure(model, loader, "test")

    def _measure(self, model: Any, loader: DistributedLoader, split: str) -> Metrics:
        first = SampleAnswers(self.task, self.prepared, split)
        tally = measure(self.engine, self.task, model, loader, self.prepared, split, samples=first)
        samples: list[dict[str, Any]] = []
        if split == "validation" and (count := self.args.eval_generations):
            samples = generate_samples(model, self.prepared, count, self.engine.device)
        if self.engine.is_main:
            tables = describe_tables(tally.tables())
            self.details.update(tables=tables, samples=samples or first.describe())
        return tally.compute()

    def get_prepared(self) -> PreparedData | None:
        return getattr(self, "prepared", None)


def train_task(
    engine: RapidformerEngine, splits: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Fine-tune on the task that ``--task`` names, with its data or these splits."""
    task = get_task(engine.args.task or "")
    unused = describe_unused_flags(engine.args, task)
    if unused is not None:
        warn_once(unused)
    return TaskFinetuner(engine, task, splits).train()
