"""Evaluate a task's model: every example of the split once, in the order of the data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rapidformer.config import Settings
from rapidformer.data.folders import name_splits
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.named_sets import NamedSet, load_set, read_sets
from rapidformer.data.sources import as_list, load_splits
from rapidformer.engine import RapidformerEngine
from rapidformer.engine.evaluation import gather_rounds, run_batches
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.log import get_logger
from rapidformer.models.location import is_from_scratch
from rapidformer.objectives import Context
from rapidformer.objectives.reference import REFERENCE
from rapidformer.strict_json import drop_not_finite, format_json
from rapidformer.tasks.base import FrozenModel, PreparedData, Record, Task
from rapidformer.tasks.evaluation.predicting import compose_task_model, show_progress
from rapidformer.tasks.evaluation.samples import SampleAnswers
from rapidformer.tasks.metrics.tally import ReportTable, Tally, start_table
from rapidformer.tasks.mixture import SetTallies, prepare_sets
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.rows.rows import take_first

if TYPE_CHECKING:
    from rich.console import Console

# Examples between two gatherings: enough to make them cheap, few enough to hold.
_HELD_EXAMPLES = 1024


def measure(
    engine: RapidformerEngine,
    task: Task,
    model: Any,
    loader: DistributedLoader,
    prepared: PreparedData,
    split: str,
    advance: Callable[[int], None] = lambda count: None,
    samples: SampleAnswers | None = None,
) -> Tally | SetTallies:
    """The metrics of a labelled split, the same on every rank; ``advance`` counts all rows.

    The first records also go to ``samples``, but not those of a mixture.
    """
    if not prepared.parts:
        tally = task.build_tally(prepared, split)

        def add(records: list[Record]) -> None:
            tally.update(records)
            if samples is not None:
                samples.add(records)

        _score(engine, task, model, loader, prepared, add, advance)
        return tally
    tallies = SetTallies(task, prepared, split)
    for name, part, places in tallies.iterate(prepared):
        own = engine.data.build_loader(
            loader.dataset, loader.collate_fn, shuffle=False, batch_size=loader.batch_size,
            is_training=False, order=places,
        )  # fmt: skip
        _score(engine, task, model, own, part, partial(tallies.update, name), advance)
    return tallies


def _score(
    engine: RapidformerEngine,
    task: Task,
    model: Any,
    loader: DistributedLoader,
    prepared: PreparedData,
    add: Callable[[list[Record]], None],
    advance: Callable[[int], None],
) -> None:
    """Every rank adds the records of all rows, in order."""
    held: list[tuple[Sequence[Record], int]] = []

    def add_held() -> None:
        records = [list(records[:rows]) for records, rows in held]
        add(gather_rounds(records, engine.runtime.topology))
        held.clear()

    limit = max(1, _HELD_EXAMPLES // loader.samples_per_round)
    step = partial(task.evaluate_step, model, prepared=prepared)
    for micro_batch, records in run_batches(loader, step):
        held.append((records, micro_batch.info.rows))
        advance(loader.samples_per_round)
        if len(held) == limit:
            add_held()
    add_held()


def evaluate_task(
    engine: RapidformerEngine,
    data: Any = None,
    measure_more: Callable[[Any, DistributedLoader], Mapping[str, float]] | None = None,
) -> EvaluationReport:
    """The metrics of a model, and those of ``measure_more``, on ``--eval-split`` or given data."""
    args = engine.args
    task = get_task(args.task or "")
    file = _find_single_file(args) if data is None else None
    sets = read_sets(args) if data is None else []
    if sets:
        split, rows = args.eval_split, None
    elif file is None:
        split, rows = args.eval_split, _choose_rows(args, args.eval_split, data)
    else:
        split, (rows,) = file.name.split(".")[0], load_splits(args, may_stream=False).values()
    # Prepare only the split to evaluate. Training rows are passed as validation rows: as train,
    # they would be prepared for training and decide which classes exist.
    name = split if split == "test" else "validation"
    # The limit above is the one that applies: --max-predict-samples would cut test rows again.
    uncapped = args.replace("evaluate", max_eval_samples=None, max_predict_samples=None)
    if sets:
        tables = _choose_set_rows(args, sets, split, name)
        count = sum(len(table[name]) for table in tables.values())
        prepared = prepare_sets(task, uncapped, sets, tables)
    else:
        rows = take_first(rows, args.max_eval_samples)
        count = len(rows)
        prepared = task.prepare(uncapped, {name: rows})
    if not prepared.is_labelled(name):
        raise DataError(f"the split {split!r} has no labels: use `rapidformer predict`.")
    started = time.perf_counter()
    model = compose_task_model(engine, task, prepared)
    prepared = add_frozen_models(engine, task, prepared)
    loader = engine.data.build_loader(
        prepared.get_split(name), prepared.collate, shuffle=False,
        batch_size=args.eval_micro_batch_size, is_training=False,
    )  # fmt: skip
    wanted = args.progress if engine.is_main else False
    with engine.model.evaluating():
        with show_progress(loader.num_samples, "evaluating", wanted=wanted) as advance:
            tally = measure(engine, task, model, loader, prepared, name, advance)
        more = dict(measure_more(model, loader)) if measure_more is not None else {}
    seconds = time.perf_counter() - started
    dropped = prepared.extras.get("dropped", {}).get(name, 0)
    examples = count - dropped
    get_logger().info(
        "evaluated %s examples of %s in %.1f s (%.0f/s)%s",
        f"{examples:,}", split, seconds, examples / seconds,
        f"; {dropped:,} were dropped" if dropped else "",
    )  # fmt: skip
    return EvaluationReport(
        task=task.name, split=split, metrics=tally.compute() | more, tables=tally.tables(),
        examples=examples, dropped=dropped, seconds=round(seconds, 3),
    )  # fmt: skip


def _find_single_file(args: Settings) -> Path | None:
    """The one file that the user named: all of it is evaluated, whatever its name says."""
    paths = as_list(args.data_path)
    is_asked = args.sources.get("data_path") in ("command line", "code")
    others = ("eval_split", "validation_split", "train_data", "valid_data", "test_data")
    if len(paths) != 1 or not is_asked or any(args.is_given(name) for name in others):
        return None
    path = Path(paths[0]).expanduser()
    return path if path.is_file() else None


def _choose_rows(args: Settings, split: str, data: Any) -> Any:
    if data is not None and not isinstance(data, Mapping):
        return data
    splits = (
        load_splits(args, may_stream=False) if data is None else name_splits(data, "the given data")
    )
    if split not in splits:
        hint = ", or give other data with --data-path" if data is None else ""
        raise DataError(
            f"the data has no split {split!r}, only {', '.join(splits)}: choose another with "
            f"--eval-split{hint}."
        )
    return splits[split]


def _choose_set_rows(
    args: Settings, sets: Sequence[NamedSet], split: str, name: str
) -> dict[str, dict[str, Any]]:
    """One split of each set of a mixture, under the name that it is prepared as."""
    tables = {}
    for number, item in enumerate(sets):
        splits = load_set(item, number, args)
        if split in splits:
            tables[item.label] = {name: take_first(splits[split], args.max_eval_samples)}
    if not tables:
        raise DataError(f"no set of the mixture has a split {split!r}: choose another.")
    return tables


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """The metrics of a model on a split; ``print(report)`` shows them as tables."""

    task: str
    split: str
    metrics: dict[str, float]
    examples: int
    """Rows that were evaluated."""
    dropped: int = 0
    """Rows that could not be."""
    seconds: float
    tables: Sequence[ReportTable] = field(default=())
    """Scores by class, entity or language pair, and the confusion matrix, if there are any."""

    def to_json(self) -> dict[str, Any]:
        """Everything, as it is written to a file."""
        result: dict[str, Any] = {"task": self.task, "split": self.split, **self.get_numbers()}
        result |= {table.key: table.to_json() for table in self.tables}
        return drop_not_finite(result)

    def get_numbers(self) -> dict[str, float]:
        """The metrics, the number of examples and the seconds."""
        counts = {"examples": self.examples, **({"dropped": self.dropped} if self.dropped else {})}
        return {**self.metrics, **counts, "seconds": self.seconds}

    def save(self, path: str | Path) -> None:
        text = format_json(self.to_json(), indent=1)
        Path(path).expanduser().write_text(text + "\n", encoding="utf-8")

    def show(self, console: Console) -> None:
        metrics = start_table([""], first="metric")
        for name, value in self.metrics.items():
            metrics.add_row(name, f"{value:.4f}" if math.isfinite(value) else str(value))
        without = f", {self.dropped:,} dropped" if self.dropped else ""
        title = f"{self.task} on {self.split}: {self.examples:,} examples{without}"
        parts = [(title, metrics), *((table.title, table.draw()) for table in self.tables)]
        for name, drawn in parts:
            console.print(f"\n{name}", style="bold", markup=False, highlight=False)
            console.print(drawn)
        console.print()

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        self.show(Console(file=text, width=120))
        return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())


def compose_frozen_models(
    engine: RapidformerEngine, task: Task, prepared: PreparedData
) -> dict[str, nn.Module]:
    """What the task builds, beside the model that learns."""
    built = task.build_frozen_models(engine.args, prepared)
    return {name: _compose(engine, model) for name, model in built.items()}


def _compose(engine: RapidformerEngine, model: FrozenModel) -> nn.Module:
    beside = engine.model.compose_beside(
        model.module, precision=model.precision, layout=model.layout
    )
    return beside.parallelized.model


def add_context(prepared: PreparedData, context: Context) -> PreparedData:
    """The data with what evaluations may ask besides the model."""
    parts = {name: add_context(part, context) for name, part in prepared.parts.items()}
    return replace(prepared, parts=parts, extras={**prepared.extras, "context": context})


def add_frozen_models(
    engine: RapidformerEngine, task: Task, prepared: PreparedData
) -> PreparedData:
    """The same for a model that is not trained; its reference is what its run started from."""
    asked = task.build_objective(engine.args).frozen
    if not asked:
        return prepared
    models = compose_frozen_models(engine, task, prepared)
    if REFERENCE in asked and REFERENCE not in models:
        start = engine.args.replace("the reference", load=None, lora_rank=None, peft_config=None)
        if is_from_scratch(start):
            raise ConfigurationError(
                f"evaluating --task {task.name} needs the model that the run started from: give it "
                "with --pretrained-model-name-or-path."
            )
        reference = FrozenModel(task.build_model(start, prepared), engine.args.reference_precision)
        models[REFERENCE] = _compose(engine, reference)
    return add_context(prepared, Context(frozen=models))
