"""Find labels that cannot be learned or compared; errors name the split and the row (from 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rapidformer.config.task_sections import ModelArguments
from rapidformer.errors import DataError, list_first
from rapidformer.log import get_logger, warn
from rapidformer.tasks.rows.rows import get_column, has_columns


def is_unlabelled(values: Sequence[Any]) -> bool:
    """Whether a column holds only placeholders, like the test sets of GLUE (-1)."""
    return all(value is None or value in (-1, "", "-1", []) for value in values)


def collect_labels(
    splits: Mapping[str, Any], column: str
) -> tuple[dict[str, list[Any]], dict[str, bool]]:
    """The column of every split that has labels, with none missing."""
    values: dict[str, list[Any]] = {}
    labelled: dict[str, bool] = {}
    for split, rows in splits.items():
        cells = get_column(rows, column) if has_columns(rows, split, [column]) else []
        labelled[split] = bool(cells) and not (split == "test" and is_unlabelled(cells))
        if labelled[split]:
            _check_present(cells, column, split)
            values[split] = cells
    if not values:
        raise DataError(
            f"No split has labels in the column {column}, so there is nothing to train on or to "
            "compare with: for rows without labels, use `rapidformer predict`."
        )
    return values, labelled


def _check_present(values: list[Any], column: str, split: str) -> None:
    is_missing = (v is None or (isinstance(v, float) and math.isnan(v)) for v in values)
    missing = [number for number, missed in enumerate(is_missing, start=1) if missed]
    if missing:
        others = f" (and {len(missing) - 1} more rows)" if len(missing) > 1 else ""
        raise DataError(
            f"{split}, row {missing[0]}{others}: the column {column} has no label; "
            "remove such rows or fill them in."
        )


def iterate_labels(values: Mapping[str, list[Any]]) -> Iterator[tuple[str, int, Any]]:
    """The split, the number of the row and the label of every row."""
    for split, items in values.items():
        for number, value in enumerate(items, start=1):
            yield split, number, value


def check_numbers(values: Mapping[str, list[Any]], column: str) -> None:
    for split, number, value in iterate_labels(values):
        try:
            float(value)
        except (TypeError, ValueError):
            raise DataError(
                f"{split}, row {number}: the label {value!r} in the column {column} is not a "
                "number, which regression needs; for classes, omit --problem-type."
            ) from None


def report_regression(values: list[Any], split: str, column: str) -> None:
    """Say that fractions make the task a regression; a few of them may be mistyped."""
    fractions = [row for row, value in enumerate(values, start=1) if float(value) % 1]
    if len(fractions) > len(values) / 10:
        get_logger().info(
            "labels    the column %s holds fractions, so the model learns a number for each row "
            "(regression)", column,
        )  # fmt: skip
        return
    if fractions:
        row = fractions[0]
        why = f"{split}, row {row}: the label {values[row - 1]!r} in the column {column} is"
        others = f" ({len(fractions)} of {len(values)} labels)" if len(fractions) > 1 else ""
    else:
        why = f"the labels of {split} in the column {column} are whole, but each is written as"
        others = ""
    warn(
        f"{why} a fraction{others}, so the model learns a number for each row (regression). Write "
        "classes as whole numbers (0, 1, ...) or names; --problem-type regression confirms numbers."
    )


def check_lists(values: Mapping[str, list[Any]], column: str) -> None:
    for split, number, value in iterate_labels(values):
        if not isinstance(value, (list, tuple)):
            raise DataError(
                f"{split}, row {number}: the label {value!r} in the column {column} is not a "
                "list, which multi-label classification needs."
            )
        for item in value:
            if not isinstance(item, (str, int, float)):
                raise DataError(
                    f"{split}, row {number}: the label {value!r} in the column {column} holds "
                    f"{item!r}, and classes are names or numbers."
                )


def count_classes(rows: Sequence[Sequence[Any]], split: str) -> int:
    """The number of classes that integer labels name: 0 to n-1, without gaps."""
    present: set[int] = set()
    for number, row in enumerate(rows, start=1):
        for value in row:
            if not isinstance(value, int) or value < 0:
                raise DataError(
                    f"{split}, row {number}: the label {value!r} is out of range: integer labels "
                    "must be 0 to n-1. Renumber them, or write them as strings."
                )
            present.add(int(value))
    if max(present) != len(present) - 1:
        ordered = sorted(present)
        gap = next(index for index in range(len(ordered) + 1) if index not in present)
        raise DataError(
            f"The labels of {split} are {list_first(ordered, 8)}: integer labels must be 0 to n-1, "
            f"and {gap} never occurs. Renumber them, write them as strings, or give "
            f"--num-labels {ordered[-1] + 1} if {gap} is a class nevertheless."
        )
    return len(present)


def check_count(count: int, args: ModelArguments, split: str) -> None:
    """Check --num-labels against the number of classes in the data."""
    if args.num_labels is not None and args.num_labels != count:
        raise DataError(
            f"--num-labels {args.num_labels}, but {split} has {count} different labels: omit the "
            "flag, or check the data."
        )
