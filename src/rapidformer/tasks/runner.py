"""Run black-box tasks on the training loop: train, evaluate and predict from settings alone.

Evaluation covers the whole split, each example exactly once: every rank records its part, the
records are put back into the order of the data, and the metric is computed on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rapidformer.data.loader import DistributedLoader
from rapidformer.data.sources import load_splits
from rapidformer.dist.collectives import gather_objects
from rapidformer.dist.topology import Topology
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import DataError
from rapidformer.log import get_logger
from rapidformer.models.location import is_from_scratch
from rapidformer.tasks.base import PreparedData, Record, Task
from rapidformer.tasks.progress import show_progress
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.rows import take_first
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
        records = collect_records(self.task, model, loader, self.prepared, self.engine.topology)
        return self.task.compute_metrics(records, self.prepared, split)


def train_task(engine: RapidformerEngine) -> dict[str, float]:
    """Fine-tune on the task that ``--task`` names."""
    return TaskFinetuner(engine, get_task(engine.args.task or "")).train()


def evaluate_task(engine: RapidformerEngine) -> dict[str, float]:
    """The metrics of a model on ``--eval-split``, with the number of examples and the seconds."""
    args = engine.args
    task, split = get_task(args.task or ""), args.eval_split
    splits = load_splits(args)
    if split not in splits:
        hint = "" if split != "validation" else ", or hold out rows with --validation-split 0.1"
        raise DataError(
            f"the data has no split {split!r}, only {', '.join(splits)}: choose another with "
            f"--eval-split{hint}."
        )
    rows = take_first(splits[split], args.max_eval_samples)
    # Prepare only the split to evaluate. Training rows are passed as validation rows: as train,
    # they would be prepared for training and decide which classes exist.
    name = "validation" if split == "train" else split
    # The limit above is the one that applies: --max-predict-samples would cut test rows again.
    uncapped = args.replace("evaluate", max_eval_samples=None, max_predict_samples=None)
    prepared = task.prepare(uncapped, {name: rows})
    if not prepared.is_labelled(name):
        raise DataError(f"the split {split!r} has no labels: use `rapidformer predict`.")
    started = time.perf_counter()
    records = _run_split(engine, task, prepared, name)
    metrics = task.compute_metrics(records, prepared, name)
    seconds = time.perf_counter() - started
    get_logger().info(
        "evaluated %s examples of %s in %.1f s (%.0f/s)",
        f"{len(rows):,}", split, seconds, len(rows) / seconds,
    )  # fmt: skip
    return {**metrics, "examples": len(rows), "seconds": round(seconds, 3)}


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


def collect_records(
    task: Task,
    model: Any,
    loader: DistributedLoader,
    prepared: PreparedData,
    topology: Topology,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Record]:
    """One record per example of the whole split, in the order of the data, on every rank.

    ``advance`` is called with the number of examples that all ranks together have done.
    """
    rounds: list[list[Record]] = []
    for each in loader.iterate_micro_batches():
        rounds.append(task.evaluate_step(model, each.batch, prepared)[: each.info.rows])
        advance(loader.samples_per_round)
    return list(_interleave(gather_objects(rounds, topology)))


def _interleave(everyone: list[list[list[Record]]]) -> Iterator[Record]:
    """Round by round, rank by rank: the order in which the loader distributed the data."""
    for slices in zip(*everyone, strict=True):
        for records in slices:
            yield from records


def _run_split(
    engine: RapidformerEngine, task: Task, prepared: PreparedData, split: str
) -> list[Record]:
    must_be_trained = not (engine.args.allow_untrained or is_from_scratch(engine.args))
    built = task.build_model(engine.args, prepared, must_be_trained=must_be_trained)
    model = engine.compose_for_evaluation(built)
    loader = engine.build_data_loader(
        prepared.get_split(split),
        prepared.collate,
        shuffle=False,
        batch_size=engine.args.eval_micro_batch_size,
        is_training=False,
    )
    records: list[Record] = []

    def run() -> dict[str, float]:
        wanted = engine.args.progress if engine.is_main else False
        with show_progress(loader.num_samples, "evaluating", wanted=wanted) as advance:
            found = collect_records(task, model, loader, prepared, engine.topology, advance)
        records.extend(found)
        return {}

    evaluate_model(engine, run)
    return records
