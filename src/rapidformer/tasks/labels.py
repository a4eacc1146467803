"""Labels as the user wrote them to what a classifier learns.

Texts become ids in sorted order, whole numbers must be 0 to n-1, fractions mean regression, lists
mean several labels per row. What a reader would get wrong: a model that already has names for its
classes keeps its own order, or a fine-tuned model would be evaluated against shuffled classes.
Rows are counted from 1 in messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rapidformer.errors import DataError
from rapidformer.log import get_logger
from rapidformer.tasks.rows import get_class_names, get_column, get_column_names, get_feature

SINGLE = "single_label_classification"
MULTI = "multi_label_classification"
REGRESSION = "regression"


@dataclass(frozen=True, kw_only=True)
class LabelSpace:
    """What labels there are, and how a value of the data becomes one."""

    problem_type: str
    names: tuple[str, ...] = ()
    ids: Mapping[Any, int] = field(default_factory=dict)
    is_multi_hot: bool = False

    @property
    def num_labels(self) -> int:
        return 1 if self.problem_type == REGRESSION else len(self.names)

    def encode(self, value: Any) -> Any:
        if self.problem_type == REGRESSION:
            return float(value)
        if self.problem_type == SINGLE:
            return self.ids[value]
        if self.is_multi_hot:
            return [float(item) for item in value]
        present = {self.ids[item] for item in value}
        return [float(index in present) for index in range(len(self.names))]

    def get_model_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "problem_type": self.problem_type,
            "num_labels": self.num_labels,
        }
        if self.problem_type != REGRESSION:
            settings["id2label"] = dict(enumerate(self.names))
            settings["label2id"] = {name: index for index, name in enumerate(self.names)}
        return settings


def get_model_names(config: Any) -> tuple[str, ...]:
    """The class names that a fine-tuned model carries; nothing where they are placeholders."""
    by_id = getattr(config, "id2label", None) or {}
    names = tuple(str(by_id[key]) for key in sorted(by_id))
    if all(name == f"LABEL_{index}" for index, name in enumerate(names)):
        return ()
    return names


def read_labels(
    splits: Mapping[str, Any], column: str, args: Any, model_names: Sequence[str] = ()
) -> tuple[LabelSpace, dict[str, bool]]:
    """The labels of all the splits, checked, and which of the splits have any."""
    values, labelled = collect_labels(splits, column)
    first = "train" if "train" in values else next(iter(values))
    names = get_class_names(get_feature(splits[first], column))
    kind = _get_problem_type(values[first], args)
    if kind == REGRESSION:
        _check_numbers(values, column)
        return LabelSpace(problem_type=kind), labelled
    if kind == MULTI:
        space = _read_multi_label(values[first], names, args, model_names)
        _check_known(values, column, space, args)
        return space, labelled
    by_row = {split: [[value] for value in items] for split, items in values.items()}
    return read_classes(by_row, column, names, args, model_names), labelled


def read_classes(
    values: Mapping[str, list[list[Any]]],
    column: str,
    names: tuple[str, ...] | None,
    args: Any,
    model_names: Sequence[str],
) -> LabelSpace:
    """One class per item, for rows of items: a row's one label, or the tags of its words."""
    has_train = "train" in values
    split = "train" if has_train else next(iter(values))
    space = _read_single_label(values[split], split, names, args, model_names, has_train)
    _check_known(values, column, space, args)
    return space


def is_unlabelled(values: Sequence[Any]) -> bool:
    """Whether a column holds placeholders only, as the test sets of GLUE do (-1)."""
    return all(value is None or value in (-1, "", "-1", []) for value in values)


def collect_labels(
    splits: Mapping[str, Any], column: str
) -> tuple[dict[str, list[Any]], dict[str, bool]]:
    """The column in every split that has labels, none of them missing."""
    values: dict[str, list[Any]] = {}
    labelled: dict[str, bool] = {}
    for split, rows in splits.items():
        has_column = column in get_column_names(rows)
        if not has_column and split != "test":
            raise DataError(
                f"{split} has no column {column}, only {', '.join(get_column_names(rows))}: "
                "all splits need the same columns."
            )
        found = get_column(rows, column) if has_column else []
        labelled[split] = bool(found) and not (split == "test" and is_unlabelled(found))
        if labelled[split]:
            values[split] = _check_present(found, column, split)
    if not values:
        raise DataError(f"No split has labels in the column {column}.")
    return values, labelled


def _check_present(values: list[Any], column: str, split: str) -> list[Any]:
    missing = [
        number
        for number, value in enumerate(values, start=1)
        if value is None or (isinstance(value, float) and math.isnan(value))
    ]
    if missing:
        others = f" (and {len(missing) - 1} more rows)" if len(missing) > 1 else ""
        raise DataError(
            f"{split}, row {missing[0]}{others}: there is no label in the column {column}; "
            "remove such rows or fill them in."
        )
    return values


def _get_problem_type(values: Sequence[Any], args: Any) -> str:
    if args.problem_type is not None:
        return str(args.problem_type)
    if isinstance(values[0], (list, tuple)):
        return MULTI
    if any(isinstance(value, float) for value in values):
        return REGRESSION
    is_number = isinstance(values[0], int)
    return REGRESSION if args.num_labels == 1 and is_number else SINGLE


def _check_numbers(values: Mapping[str, list[Any]], column: str) -> None:
    for split, items in values.items():
        for number, value in enumerate(items, start=1):
            try:
                float(value)
            except (TypeError, ValueError):
                raise DataError(
                    f"{split}, row {number}: the label {value!r} in the column {column} is not a "
                    "number, which regression needs; for classes leave --problem-type out."
                ) from None


def _read_single_label(
    rows: Sequence[Sequence[Any]],
    split: str,
    names: tuple[str, ...] | None,
    args: Any,
    model_names: Sequence[str],
    has_train: bool,
) -> LabelSpace:
    first = next((item for row in rows for item in row), None)
    if isinstance(first, (list, tuple, dict, float)) or first is None:
        raise DataError(
            f"The labels of {split} hold {first!r}, which names no class: classes are texts or "
            "whole numbers from 0 on."
        )
    if isinstance(first, str):
        found = _sort_names({str(item) for row in rows for item in row})
        chosen = _prefer_model_order(found, model_names, is_subset_enough=not has_train)
        ids: dict[Any, int] = _number(chosen)
    elif names is not None:
        chosen = _prefer_model_order(names, model_names, is_subset_enough=not has_train)
        ids = {index: chosen.index(name) for index, name in enumerate(names)}
    else:
        count = args.num_labels or (len(model_names) if model_names and not has_train else None)
        count = count or _count_classes(rows, split)
        chosen = tuple(model_names) if len(model_names) == count else _number_names(count)
        ids = {index: index for index in range(count)}
    _check_count(len(chosen), args, split)
    return LabelSpace(problem_type=SINGLE, names=_at_least_two(chosen), ids=ids)


def _count_classes(rows: Sequence[Sequence[Any]], split: str) -> int:
    present: set[int] = set()
    for number, row in enumerate(rows, start=1):
        for value in row:
            if not isinstance(value, int) or value < 0:
                raise DataError(
                    f"{split}, row {number}: the label {value!r} is out of range: whole-number "
                    "labels go from 0 to n-1. Renumber them, or write them as texts."
                )
            present.add(int(value))
    if max(present) != len(present) - 1:
        ordered = sorted(present)
        gap = next(index for index in range(len(ordered) + 1) if index not in present)
        shown = ", ".join(map(str, ordered[:8])) + (", ..." if ordered[8:] else "")
        raise DataError(
            f"The labels of {split} are {shown}: whole-number labels must be 0 to n-1, and "
            f"{gap} never occurs. Renumber them, write them as texts, or say "
            f"--num-labels {ordered[-1] + 1} if {gap} is a class all the same."
        )
    return len(present)


def _read_multi_label(
    values: Sequence[Any], names: tuple[str, ...] | None, args: Any, model_names: Sequence[str]
) -> LabelSpace:
    items = [item for value in values for item in value]
    if not items:
        raise DataError("The rows have lists of labels, but every list is empty.")
    if isinstance(items[0], str):
        chosen = _prefer_model_order(_sort_names(set(items)), model_names, is_subset_enough=True)
        return LabelSpace(problem_type=MULTI, names=chosen, ids=_number(chosen))
    if names is None and _is_multi_hot(values):
        count = len(values[0])
        chosen = tuple(model_names) if len(model_names) == count else _number_names(count)
        return LabelSpace(problem_type=MULTI, names=chosen, is_multi_hot=True)
    if names is not None:
        chosen = _prefer_model_order(names, model_names, is_subset_enough=False)
        ids: dict[Any, int] = {index: chosen.index(name) for index, name in enumerate(names)}
        return LabelSpace(problem_type=MULTI, names=chosen, ids=ids)
    count = args.num_labels or max(items) + 1
    chosen = tuple(model_names) if len(model_names) == count else _number_names(count)
    return LabelSpace(problem_type=MULTI, names=chosen, ids={i: i for i in range(count)})


def _is_multi_hot(values: Sequence[Sequence[Any]]) -> bool:
    """[1, 0, 0] as a row of switches; a list of ids would not name a class twice."""
    lengths = {len(value) for value in values}
    if len(lengths) != 1 or any(item not in (0, 1) for value in values for item in value):
        return any(isinstance(item, float) for value in values for item in value)
    has_floats = isinstance(values[0][0], float)
    return has_floats or any(len(set(value)) < len(value) for value in values)


def _check_known(
    values: Mapping[str, list[Any]], column: str, space: LabelSpace, args: Any
) -> None:
    for split, items in values.items():
        for number, value in enumerate(items, start=1):
            if space.is_multi_hot:
                problem = None if len(value) == space.num_labels else value
            else:
                problem = _first_unknown(value, space)
            if problem is None:
                continue
            known = _describe_known(problem, space, args)
            place = f"{split}, row {number}: the label {problem!r} in the column {column}"
            if "train" in values and split != "train" and args.num_labels is None:
                raise DataError(
                    f"{place} does not occur in training, where the labels are {known}."
                )
            raise DataError(f"{place} is out of range: the labels are {known}.")


def _first_unknown(value: Any, space: LabelSpace) -> Any | None:
    return next((item for item in value if item not in space.ids), None)


def _describe_known(value: Any, space: LabelSpace, args: Any) -> str:
    if space.is_multi_hot:
        return f"lists of {space.num_labels} numbers"
    if isinstance(value, str):
        return ", ".join(space.names[:10]) + (", ..." if space.names[10:] else "")
    reason = f" (--num-labels {args.num_labels})" if args.num_labels else ""
    return f"0 to {len(space.ids) - 1}{reason}"


def _prefer_model_order(
    found: Sequence[str], model_names: Sequence[str], is_subset_enough: bool
) -> tuple[str, ...]:
    if set(found) == set(model_names):
        return tuple(model_names)
    if is_subset_enough and model_names and set(found) <= set(model_names):
        return tuple(model_names)
    return tuple(found)


def _check_count(found: int, args: Any, split: str) -> None:
    if args.num_labels is not None and args.num_labels != found:
        raise DataError(
            f"--num-labels {args.num_labels}, but {split} has {found} different labels: leave the "
            "flag out, or check the data."
        )


def _at_least_two(names: tuple[str, ...]) -> tuple[str, ...]:
    """A head of one output would be taken for regression."""
    if len(names) > 1:
        return names
    get_logger().warning("All rows have the same label, %s: there is nothing to learn.", names[0])
    return (*names, f"not {names[0]}")


def _sort_names(names: set[str]) -> tuple[str, ...]:
    if all(name.lstrip("-").isdigit() for name in names):
        return tuple(sorted(names, key=int))
    return tuple(sorted(names))


def _number_names(count: int) -> tuple[str, ...]:
    return tuple(str(index) for index in range(count))


def _number(names: Sequence[str]) -> dict[Any, int]:
    return {name: index for index, name in enumerate(names)}
