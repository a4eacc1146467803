"""Data of a run that is a mixture: each set is prepared by itself, then all are joined.

Columns are found for each set, so the sets may have different ones. What the model needs must be
the same for all of them: classes are joined by name, so that an id means the same in every set.
Evaluations give the metrics of each set, and those of all rows together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

from rapidformer.config import Settings
from rapidformer.data.named_sets import NamedSet, load_set, read_sets
from rapidformer.errors import DataError, list_first
from rapidformer.log import get_logger, warn_once
from rapidformer.tasks.base import PreparedData, Task
from rapidformer.tasks.labels.labels import sort_classes
from rapidformer.tasks.metrics.tally import Record, ReportTable, Tally, compute_perplexity
from rapidformer.tasks.rows.columns import find_column
from rapidformer.tasks.rows.rows import (
    get_class_names,
    get_column,
    get_column_names,
    is_row_stream,
    quiet_datasets,
)

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
    from rapidformer.data.mixture import MixedStream

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
    collate: Any = first.collate
    if hasattr(collate, "join"):  # it depends on the rows, which all must fit
        collate = reduce(type(collate).join, [part.collate for part in parts.values()])
    return replace(
        first, **joined, parts=parts, collate=collate,
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


Splits = dict[str, Any]


def merge_classes(sets: Mapping[str, Splits], columns: Sequence[str]) -> dict[str, Any]:
    """Let the ``columns`` of labels, one for each set, have the same classes in all sets.

    Changes the splits, and returns what has to be set besides.
    """
    labels = zip(sets.items(), columns, strict=True)
    found = {
        name: _find_classes(splits.get("train", next(iter(splits.values()))), column)
        for (name, splits), column in labels
    }
    names = {name: classes for name, classes in found.items() if not isinstance(classes, int)}
    if not names:
        count = max((classes for classes in found.values() if isinstance(classes, int)), default=0)
        return {"num_labels": count} if count else {}
    if len(names) < len(found):
        named, numbered = next(iter(names)), next(name for name in found if name not in names)
        raise DataError(
            f"{named} has labels with names ({list_first(names[named])}) and {numbered} has "
            "numbers: their classes cannot be compared. Write the names into the rows of both."
        )
    if len(set(names.values())) == 1:
        return {}
    union = sort_classes({label for classes in names.values() for label in classes})
    get_logger().info("labels    %d classes in all sets: %s", len(union), list_first(union))
    if any(is_row_stream(rows) for splits in sets.values() for rows in splits.values()):
        return {"label_names": list(union)}
    for (name, splits), column in zip(sets.items(), columns, strict=True):
        for split, rows in splits.items():
            if column in rows.column_names:
                splits[split] = _name_labels(rows, column, union, f"{name}, {split}")
    return {}


def _find_classes(rows: Any, column: str) -> tuple[str, ...] | int:
    """The names of the classes, or their number; 0 if the labels are no classes."""
    if (declared := get_class_names(rows, column)) is not None:
        return declared
    values = [value for value in _flatten(get_column(rows, column)) if value is not None]
    if values and isinstance(values[0], str):
        return sort_classes({str(value) for value in values})
    is_counted = bool(values) and all(isinstance(value, int) for value in values)
    return max(values) + 1 if is_counted else 0


def _flatten(values: Sequence[Any]) -> list[Any]:
    if any(isinstance(value, (list, tuple)) for value in values):
        return [item for value in values for item in value or ()]
    return list(values)


def _name_labels(rows: Any, column: str, names: Sequence[str], where: str) -> Any:
    """The table with ids of these classes."""
    import datasets

    declared, ids = get_class_names(rows, column), {name: i for i, name in enumerate(names)}

    def encode(value: Any, row: int) -> Any:
        if isinstance(value, (list, tuple)):
            return [encode(item, row) for item in value]
        name = declared[value] if declared is not None and isinstance(value, int) else value
        if value is not None and name not in ids:
            raise DataError(
                f"{where}, row {row}: the label {name!r} in the column {column} does not occur in "
                f"the training data, whose labels are {list_first(names)}."
            )
        return None if value is None else ids[name]

    values = [encode(value, row) for row, value in enumerate(get_column(rows, column), start=1)]
    feature: Any = datasets.ClassLabel(names=list(names))
    if any(isinstance(value, list) for value in values):
        feature = datasets.List(feature)
    with quiet_datasets():
        return rows.remove_columns(column).add_column(column, values, feature=feature)
