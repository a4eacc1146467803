"""Classes of several data sets: joined by name, so that an id means the same in every set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rapidformer.errors import DataError, list_first
from rapidformer.log import get_logger
from rapidformer.tasks.labels.labels import sort_classes
from rapidformer.tasks.rows.rows import get_class_names, get_column, is_row_stream, quiet_datasets

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
