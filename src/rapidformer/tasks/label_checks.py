"""Labels that cannot be learnt or compared, each told by its split and row (counted from 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rapidformer.errors import DataError
from rapidformer.tasks.label_space import LabelSpace, ModelClasses
from rapidformer.tasks.rows import get_column, get_column_names


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
        raise DataError(
            f"No split has labels in the column {column}, so there is nothing to learn or to "
            "compare with: for rows without labels use `rapidformer predict`."
        )
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


def check_numbers(values: Mapping[str, list[Any]], column: str) -> None:
    """Regression needs numbers."""
    for split, items in values.items():
        for number, value in enumerate(items, start=1):
            try:
                float(value)
            except (TypeError, ValueError):
                raise DataError(
                    f"{split}, row {number}: the label {value!r} in the column {column} is not a "
                    "number, which regression needs; for classes leave --problem-type out."
                ) from None


def check_lists(values: Mapping[str, list[Any]], column: str) -> None:
    """Several labels per row need lists."""
    for split, items in values.items():
        for number, value in enumerate(items, start=1):
            if not isinstance(value, (list, tuple)):
                raise DataError(
                    f"{split}, row {number}: the label {value!r} in the column {column} is not a "
                    "list, which several labels per row need."
                )


def count_classes(rows: Sequence[Sequence[Any]], split: str) -> int:
    """How many classes whole numbers name: 0 to n-1, none of them missing."""
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


def check_contradiction(args: Any, learnt: ModelClasses) -> None:
    """A model that is evaluated has the number of classes that it has."""
    if learnt.count and args.num_labels not in (None, learnt.count):
        raise DataError(
            f"--num-labels {args.num_labels} contradicts the model, which was trained for "
            f"{learnt.count} labels: leave the flag out."
        )


def check_count(found: int, args: Any, split: str) -> None:
    """Classes that were found in the data, against the number that was given."""
    if args.num_labels is not None and args.num_labels != found:
        raise DataError(
            f"--num-labels {args.num_labels}, but {split} has {found} different labels: leave the "
            "flag out, or check the data."
        )


def check_known(
    values: Mapping[str, list[Any]],
    column: str,
    space: LabelSpace,
    args: Any,
    learnt: ModelClasses,
    declared: Sequence[str] | None,
) -> None:
    """Refuse a label outside the space; ``declared`` are the data's own names for its numbers."""
    for split, items in values.items():
        for number, value in enumerate(items, start=1):
            if space.is_multi_hot:
                problem = None if len(value) == space.num_labels else value
            else:
                problem = next((item for item in value if item not in space.ids), None)
            if problem is None:
                continue
            known = _describe_known(problem, space, args)
            place = f"{split}, row {number}: the label {problem!r} in the column {column}"
            if learnt.count:
                is_named = declared and isinstance(problem, int) and 0 <= problem < len(declared)
                name = f" ({declared[problem]})" if declared and is_named else ""
                classes = ", ".join(space.names[:10]) + (", ..." if space.names[10:] else "")
                raise DataError(
                    f"{place}{name} is none that the model knows: it was trained for "
                    f"{known if space.is_multi_hot else classes}."
                )
            if "train" in values and split != "train" and args.num_labels is None:
                raise DataError(
                    f"{place} does not occur in training, where the labels are {known}."
                )
            raise DataError(f"{place} is out of range: the labels are {known}.")


def _describe_known(value: Any, space: LabelSpace, args: Any) -> str:
    if space.is_multi_hot:
        return f"lists of {space.num_labels} numbers"
    if isinstance(value, str):
        return ", ".join(space.names[:10]) + (", ..." if space.names[10:] else "")
    reason = f" (--num-labels {args.num_labels})" if args.num_labels else ""
    return f"0 to {len(space.ids) - 1}{reason}"
