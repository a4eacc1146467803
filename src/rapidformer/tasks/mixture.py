"""Data of a run that is a mixture: each set is prepared by itself, then all are joined.

Columns are found for each set, so the sets may have different ones. What the model needs must be
the same for all of them. Evaluations give the metrics of each set, and those of all rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

from rapidformer.config import Settings
from rapidformer.data.named_sets import NamedSet, load_set, read_sets
from rapidformer.errors import DataError
from rapidformer.log import warn_once
from rapidformer.tasks.base import PreparedData, Task
from rapidformer.tasks.labels.merging import merge_classes
from rapidformer.tasks.metrics.tally import Record, ReportTable, Tally, compute_perplexity
from rapidformer.tasks.rows.columns import find_column
from rapidformer.tasks.rows.rows import get_column_names, is_row_stream

_SPLITS = ("train", "validation", "test")
_NOT_MEANS = ("loss", "perplexity", "bleu")
"""Metrics that are no means over examples."""
_ONE_FOR_ALL = ("problem_type", "names", "loss", "lists")
"""Extras on which the model or the objective depends."""


def prepare_data(
    task: Task, args: Settings, splits: Mapping[str, Any] | None = None
) -> PreparedData:
    """The data that was given or that the settings name, which may be several sets."""
    if not task.streams and any(not hasattr(rows, "__len__") for rows in (splits or {}).values()):
        raise DataError(
            f"the task {task.name} prepares all rows at once: give it data with a length, not an "
            "iterable data set."
        )
    sets = read_sets(args) if splits is None else []
    if not sets:
        return task.prepare(args, splits)
    tables = {item.label: load_set(item, number, args) for number, item in enumerate(sets)}
    return prepare_sets(task, args, sets, tables)


def prepare_sets(
    task: Task, args: Settings, sets: Sequence[NamedSet], tables: dict[str, dict[str, Any]]
) -> PreparedData:
    """The splits of several sets, prepared one by one and joined; ``tables`` may be changed."""
    of_sets = {item.label: item.apply(args) for item in sets if item.label in tables}
    if task.learns_classes:
        found = _merge_classes(task, of_sets, tables)
        of_sets = {
            name: own.replace("the classes of all sets", **found) for name, own in of_sets.items()
        }
    parts = {name: _prepare(task, name, of_sets[name], rows) for name, rows in tables.items()}
    weights = [item.weight for item in sets if item.weight is not None]
    if args.is_changed("data_stopping") and not weights:
        warn_once("--data-stopping has no effect without weights: an epoch has all rows once.")
    return _join(parts, weights or None, args.data_stopping)


def _merge_classes(
    task: Task, of_sets: Mapping[str, Settings], tables: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Settings that let labels mean the same in all sets, unless the user has given them."""
    role = next(role for role in task.columns if role.setting == "label_column")
    columns = []
    for name, splits in tables.items():
        with _naming(name):
            available = get_column_names(next(iter(splits.values())))
            columns.append(str(find_column(role, available, of_sets[name])))
    args = next(iter(of_sets.values()))
    found = merge_classes(tables, columns)
    return {key: value for key, value in found.items() if getattr(args, key) is None}


def _prepare(task: Task, name: str, args: Settings, splits: Mapping[str, Any]) -> PreparedData:
    with _naming(name):
        return task.prepare(args, splits)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say which set an error is about."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def _join(
    parts: Mapping[str, PreparedData], weights: Sequence[float] | None, stopping: str
) -> PreparedData:
    from rapidformer.data.streams.mixed import MixedStream

    first = next(iter(parts.values()))
    for name, part in parts.items():
        _check_same(first, part, next(iter(parts)), name)
    joined = {split: _join_split(parts, split) for split in _SPLITS}
    if weights is not None and is_row_stream(first.train):
        streams: dict[str, Any] = {name: part.train for name, part in parts.items()}
        joined["train"] = MixedStream(streams, weights)
    elif joined["train"] is not None and weights is not None:
        train = joined["train"]
        train.sets = replace(train.sets, weights=tuple(weights), stopping=stopping)
    labelled = {
        split: all(p.is_labelled(split) for p in parts.values() if p.get_split(split) is not None)
        for split in _SPLITS
    }
    collates = [part.collate for part in parts.values()]
    return replace(
        first, **joined, parts=parts, collate=reduce(_join_collates, collates),
        extras={**first.extras, "labelled": labelled},
    )  # fmt: skip


def _join_split(parts: Mapping[str, PreparedData], split: str) -> Any:
    from rapidformer.data.mixture import JoinedRows, Sets

    found: dict[str, Any] = {name: part.get_split(split) for name, part in parts.items()}
    found = {n: rows for n, rows in found.items() if rows is not None and not is_row_stream(rows)}
    if not found:
        return None
    sizes = tuple(len(rows) for rows in found.values())
    return JoinedRows(list(found.values()), Sets(tuple(found), sizes))


def _join_collates(first: Any, second: Any) -> Any:
    """One for the rows of both sets, which differ for a few tasks."""
    join: Callable[[Any], Any] | None = getattr(first, "join", None)
    return first if join is None else join(second)


def _check_same(first: PreparedData, second: PreparedData, name: str, other: str) -> None:
    """Refuse sets for which the model or the objective would have to differ."""
    for key in first.model_settings:
        a, b = first.model_settings[key], second.model_settings.get(key)
        # The names of columns may differ, but not their number.
        is_same = len(a) == len(b) if isinstance(a, list) and isinstance(b, list) else a == b
        if not is_same:
            raise DataError(_describe_difference(key, name, a, other, b))
    for key in _ONE_FOR_ALL:
        a, b = first.extras.get(key), second.extras.get(key)
        if a != b:
            raise DataError(_describe_difference(key, name, a, other, b))


def _describe_difference(key: str, name: str, a: Any, other: str, b: Any) -> str:
    return (
        f"the sets need different models: {key} is {a} for {name} and {b} for {other}. Give both "
        "the same kind of labels and columns, or train on one of them."
    )


# ---- evaluation ----------------------------------------------------------------------------------


class SetTallies:
    """The metrics of each set and of all rows, from the records of one set after the other."""

    def __init__(self, task: Task, prepared: PreparedData, split: str) -> None:
        self._task, self._split = task, split
        parts = [(n, p) for n, p in prepared.parts.items() if p.get_split(split) is not None]
        self.parts = dict(parts)
        self._tallies = {name: task.build_tally(part, split) for name, part in parts}
        # A tally that reads the rows of its own set cannot take the records of all.
        self.total: Tally | None = None
        if not task.tally_reads_rows:
            self.total = task.build_tally(prepared, split)

    @property
    def examples(self) -> int:
        """How many of the user's examples were scored so far."""
        return sum(tally.examples for tally in self._tallies.values())

    def update(self, name: str, records: Sequence[Record]) -> None:
        self._tallies[name].update(records)
        if self.total is not None:
            self.total.update(records)

    def tables(self) -> list[ReportTable]:
        """Details about all rows together."""
        return [] if self.total is None else self.total.tables()

    def compute(self) -> dict[str, float]:
        """The metrics of all rows, then those of the sets with their names in front."""
        by_set = {name: tally.compute() for name, tally in self._tallies.items()}
        total = self._average(by_set) if self.total is None else self.total.compute()
        named = {f"{name}_{key}": v for name, scores in by_set.items() for key, v in scores.items()}
        return {**total, **named}

    def _average(self, by_set: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Means over all examples; of the loss, over all labels."""
        tallies, scores = list(self._tallies.values()), list(by_set.values())
        terms = sum(tally.terms for tally in tallies)
        examples = sum(tally.examples for tally in tallies)
        loss = sum(tally.get_mean_loss() * tally.terms for tally in tallies if tally.terms)
        total = {"loss": loss / terms if terms else float("nan")}
        if "perplexity" in scores[0]:
            total["perplexity"] = compute_perplexity(total["loss"])
        for key in scores[0]:
            if key not in _NOT_MEANS and all(key in each for each in scores):
                summed = sum(
                    t.examples * each[key] for t, each in zip(tallies, scores, strict=True)
                )
                total[key] = summed / examples if examples else float("nan")
        return total

    def iterate(self, prepared: PreparedData) -> Iterator[tuple[str, PreparedData, range]]:
        """Each set with the places of its rows."""
        rows: Any = prepared.get_split(self._split)
        for number, name in enumerate(rows.sets.names):
            yield name, self.parts[name], rows.sets.get_range(number)
