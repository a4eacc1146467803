"""Run black-box tasks on the training loop: train and predict from settings alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rapidformer.data.loader import DistributedLoader
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import DataError
from rapidformer.log import get_logger
from rapidformer.tasks.base import PreparedData, Record, Task
from rapidformer.tasks.evaluating import compose_split, iterate_records, measure
from rapidformer.tasks.progress import show_progress
from rapidformer.tasks.registry import get_task
from rapidformer.training.finetuner import Finetuner
from rapidformer.training.loop import Metrics, evaluate_model


class TaskFinetuner(Finetuner):
    """A Finetuner whose hooks come from a task."""

    def __init__(self, engine: RapidformerEngine, task: Task) -> None:
        super().__init__(engine)
        self.task = task
        self.has_shifted_labels = task.has_shifted_labels
        self.prepared: PreparedData | None = None

    def train_valid_test_datasets_provider(self) -> tuple[Any, Any, Any, Any]:
        prepared = self.prepare_data()
        if prepared.train is None:
            raise DataError(
                "the data has no training split: name a file train.…, or use --train-data."
            )
        self.prepared = prepared
        self.processor = prepared.processor
        self.best_metric, self.greater_is_better = self.task.get_best_metric(prepared)
        validation = prepared.validation if prepared.is_labelled("validation") else None
        if validation is None:
            get_logger().warning(
                "there is no labelled validation split: the model is not evaluated, and only the "
                "last one is saved. --validation-split 0.1 holds out rows for validation."
            )
        return prepared.train, validation, prepared.test, prepared.collate

    def prepare_data(self) -> PreparedData:
        """The splits that the settings name, ready for the model."""
        return self.task.prepare(self.args)

    def model_optimizer_lr_scheduler_provider(self) -> tuple[Any, Any, Any]:
        assert self.prepared is not None
        return self.task.build_model(self.args, self.prepared), None, None

    def run_forward_step(self, batch_or_iterator: Any, model: Any) -> Any:
        return self.task.forward(model, batch_or_iterator)

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        return self._measure(model[0], eval_dataloader, "validation")

    def make_test(self, model: Any, dataset: Any, collate: Any) -> Callable[[], Metrics] | None:
        """On test data with labels alone: some published test sets have none."""
        assert self.prepared is not None
        loader = self.build_eval_loader(dataset, collate)
        if loader is None or not self.prepared.is_labelled("test"):
            return None
        return lambda: self._measure(model, loader, "test")

    def _measure(self, model: Any, loader: DistributedLoader, split: str) -> Metrics:
        assert self.prepared is not None
        topology = self.engine.topology
        return measure(self.task, model, loader, self.prepared, split, topology).compute()


def train_task(engine: RapidformerEngine) -> dict[str, float]:
    """Fine-tune on the task that ``--task`` names."""
    return TaskFinetuner(engine, get_task(engine.args.task or "")).train()


def predict_task(
    engine: RapidformerEngine, rows: Sequence[dict[str, Any] | str]
) -> list[dict[str, Any]]:
    """A model's answers to rows without labels, in order, next to the rows' own columns."""
    task = get_task(engine.args.task or "")
    prepared = task.prepare_for_prediction(engine.args, rows)
    records = _run_split(engine, task, prepared, "test")
    answers = task.predictions(records, prepared, "test")
    return [_join(row, answer, task) for row, answer in zip(rows, answers, strict=True)]


def _join(row: dict[str, Any] | str, answer: dict[str, Any], task: Task) -> dict[str, Any]:
    """A row's columns, including ids and gold labels, and the model's answers.

    An answer with the same name as a column is called ``predicted_...``.
    """
    if isinstance(row, str):
        return answer
    joined = {name: value for name, value in row.items() if _fits_json(value)}
    for name, value in answer.items():
        if name not in row:
            joined[name] = value
        elif name in task.answer_keys:
            joined[f"predicted_{name}"] = value
        else:
            joined.setdefault(name, value)
    return joined


def _fits_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_fits_json(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_fits_json(item) for item in value)
    return value is None or isinstance(value, (str, int, float, bool))


def _run_split(
    engine: RapidformerEngine, task: Task, prepared: PreparedData, split: str
) -> list[Record]:
    model, loader = compose_split(engine, task, prepared, split)
    records: list[Record] = []

    def run() -> dict[str, float]:
        wanted = engine.args.progress if engine.is_main else False
        with show_progress(loader.num_samples, "evaluating", wanted=wanted) as advance:
            for found in iterate_records(task, model, loader, prepared, engine.topology, advance):
                records.extend(found)
        return {}

    evaluate_model(engine, run)
    return records
