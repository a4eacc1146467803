"""Turn labels as the user wrote them into what a classifier learns.

Strings become ids in sorted order, integers must be 0 to n-1, floats mean regression, lists mean
several labels per row. Without a training split, a fine-tuned model is being evaluated: its own
classes apply, not those found in the data, because a test set may lack a class, and a label that
the model never learned is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rapidformer.config import Settings
from rapidformer.errors import DataError
from rapidformer.log import warn
from rapidformer.tasks.labels.checks import (
    check_contradiction,
    check_count,
    check_known,
    check_lists,
    check_numbers,
    collect_labels,
    count_classes,
    warn_about_few_fractions,
)
from rapidformer.tasks.labels.space import (
    MULTI,
    REGRESSION,
    SINGLE,
    LabelSpace,
    ModelClasses,
    number_names,
)
from rapidformer.tasks.rows.rows import get_class_names, get_feature

_NO_CLASSES = ModelClasses()


def read_labels(
    splits: Mapping[str, Any], column: str, args: Settings, model: ModelClasses = _NO_CLASSES
) -> tuple[LabelSpace, dict[str, bool]]:
    """The checked labels of all splits, and which splits have labels."""
    values, labelled = collect_labels(splits, column)
    first = get_leading_split(values)
    learned = _get_learned(values, model)
    kind = _get_problem_type(values[first], args, learned)
    if kind == REGRESSION:
        check_numbers(values, column)
        if args.problem_type is None and learned.problem_type is None and args.num_labels != 1:
            warn_about_few_fractions(values[first], first, column)
        return LabelSpace(problem_type=kind), labelled
    names = get_class_names(get_feature(splits[first], column))
    read = _read_multi_label if kind == MULTI else read_classes
    if kind == SINGLE:
        values = {split: [[value] for value in items] for split, items in values.items()}
    return read(values, column, names, args, model), labelled


def read_classes(
    values: Mapping[str, list[list[Any]]],
    column: str,
    names: tuple[str, ...] | None,
    args: Settings,
    model: ModelClasses,
) -> LabelSpace:
    """One class per item, for rows of items: a row's single label, or the tags of its words."""
    split, learned = get_leading_split(values), _get_learned(values, model)
    check_contradiction(args, learned)
    rows = values[split]
    first = next((item for row in rows for item in row), None)
    if isinstance(first, (list, tuple, dict, float)) or first is None:
        raise DataError(
            f"The labels of {split} contain {first!r}, which is not a class: classes are strings "
            "or integers from 0 up."
        )
    if isinstance(first, str):
        classes = _sort_names({str(item) for row in rows for item in row})
        chosen = _choose_names(classes, model, learned)
        ids = _number(chosen)
    elif names is not None:
        chosen, ids = _place_declared(names, model, learned)
    else:
        count = args.num_labels or learned.count or count_classes(rows, split)
        chosen = model.names if model.count == count and model.names else number_names(count)
        ids = {index: index for index in range(count)}
    check_count(len(chosen), args, split)
    space = LabelSpace(problem_type=SINGLE, names=_at_least_two(chosen), ids=ids)
    check_known(values, column, space, args, learned, names)
    return space


def get_leading_split(values: Mapping[str, Any]) -> str:
    """The split that determines which labels exist."""
    return "train" if "train" in values else next(iter(values))


def _get_learned(values: Mapping[str, Any], model: ModelClasses) -> ModelClasses:
    """The classes that the data must match: none when training, since the head may be replaced."""
    return _NO_CLASSES if "train" in values else model


def _get_problem_type(values: Sequence[Any], args: Settings, learned: ModelClasses) -> str:
    if args.problem_type is not None:
        return str(args.problem_type)
    if learned.problem_type is not None:
        return learned.problem_type
    if isinstance(values[0], (list, tuple)):
        return MULTI
    if learned.count:
        return SINGLE
    if any(isinstance(value, float) for value in values):
        return REGRESSION
    is_number = isinstance(values[0], int)
    return REGRESSION if args.num_labels == 1 and is_number else SINGLE


def _read_multi_label(
    values: Mapping[str, list[Any]],
    column: str,
    names: tuple[str, ...] | None,
    args: Settings,
    model: ModelClasses,
) -> LabelSpace:
    learned = _get_learned(values, model)
    check_contradiction(args, learned)
    check_lists(values, column)
    rows = values[get_leading_split(values)]
    items = [item for row in rows for item in row]
    if not items:
        raise DataError("The labels are lists, but every list is empty.")
    ids: dict[Any, int] = {}
    is_multi_hot = names is None and _is_multi_hot(rows, learned.count)
    if isinstance(items[0], str):
        classes = _sort_names(set(items))
        is_subset = set(classes) <= set(model.names)
        chosen = model.names if is_subset else _choose_names(classes, model, learned)
        ids = _number(chosen)
    elif names is not None:
        chosen, ids = _place_declared(names, model, learned)
    else:
        shown = len(rows[0]) if is_multi_hot else args.num_labels or max(items) + 1
        count = learned.count or shown
        chosen = model.names if model.count == count and model.names else number_names(count)
        ids = {} if is_multi_hot else {index: index for index in range(count)}
    space = LabelSpace(problem_type=MULTI, names=chosen, ids=ids, is_multi_hot=is_multi_hot)
    check_known(values, column, space, args, learned, names)
    return space


def _is_multi_hot(rows: Sequence[Sequence[Any]], num_learned: int) -> bool:
    """Whether rows such as [1, 0, 0] are multi-hot; a list of ids would not repeat a class."""
    if any(isinstance(item, float) for row in rows for item in row):
        return True
    lengths = {len(row) for row in rows}
    if len(lengths) != 1 or any(item not in (0, 1) for row in rows for item in row):
        return False
    # If these were ids, every row would have both classes, and there would be nothing to learn.
    length = lengths.pop()
    return length > 1 and num_learned in (0, length)


# --- the data's classes and the model's ----------------------------------------------------------


def _choose_names(
    names: Sequence[str], model: ModelClasses, learned: ModelClasses
) -> tuple[str, ...]:
    """The classes in the model's order, if they are its classes or have to be."""
    if learned.count or set(names) == set(model.names):
        return model.outputs
    return tuple(names)


def _place_declared(
    names: tuple[str, ...], model: ModelClasses, learned: ModelClasses
) -> tuple[tuple[str, ...], dict[Any, int]]:
    """The classes, and the ids of the numbers that index the names declared by the data."""
    if learned.count and model.are_numbers and not set(names) <= set(model.outputs):
        # The model knows its classes only as numbers, so only numbers can be compared.
        chosen = names if len(names) == model.count else number_names(model.count)
        return chosen, {index: index for index in range(model.count)}
    chosen = _choose_names(names, model, learned)
    return chosen, {i: chosen.index(name) for i, name in enumerate(names) if name in chosen}


def _at_least_two(names: tuple[str, ...]) -> tuple[str, ...]:
    """Add a second class, because a head with one output would mean regression."""
    if len(names) > 1:
        return names
    warn("All rows have the same label, %s: there is nothing to learn.", names[0])
    return (*names, f"not {names[0]}")


def _sort_names(names: set[str]) -> tuple[str, ...]:
    if all(name.lstrip("-").isdigit() for name in names):
        return tuple(sorted(names, key=int))
    return tuple(sorted(names))


def _number(names: Sequence[str]) -> dict[Any, int]:
    return {name: index for index, name in enumerate(names)}
