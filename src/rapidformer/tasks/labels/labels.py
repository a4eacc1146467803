"""Turn labels as the user wrote them into what a classifier learns.

Strings become ids in sorted order, integers must be 0 to n-1, floats mean regression, lists several
labels per row. Without a training split, a fine-tuned model is evaluated, and its classes apply.
`LABEL_0`, ... are no names: transformers writes them if the classes have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.task_sections import ModelArguments
from rapidformer.errors import DataError, list_first
from rapidformer.log import get_logger, warn
from rapidformer.tasks.labels import checks
from rapidformer.tasks.rows.rows import get_class_names, is_row_stream

SINGLE = "single_label_classification"
MULTI = "multi_label_classification"
REGRESSION = "regression"


@dataclass(frozen=True, kw_only=True)
class LabelSpace:
    """The labels of the data, and how its values map to them."""

    column: str
    problem_type: str
    names: tuple[str, ...] = ()
    ids: Mapping[Any, int] = field(default_factory=dict)
    is_multi_hot: bool = False

    @property
    def num_labels(self) -> int:
        return 1 if self.problem_type == REGRESSION else len(self.names)

    def encode(self, value: Any) -> Any:
        """What the model learns; only in a stream, a value may be unknown by now."""
        try:
            if self.problem_type == REGRESSION:
                return float(value)
            if self.problem_type == SINGLE:
                return self.ids[value]
            if self.is_multi_hot:
                return [float(item) for _, item in zip(self.names, value, strict=True)]
            present = {self.ids[item] for item in value}
        except (KeyError, TypeError, ValueError):
            known = "numbers" if self.problem_type == REGRESSION else list_first(self.names)
            raise DataError(
                f"the label {value!r} in the column {self.column} is not one of those in the first "
                f"rows ({known}): correct it, or name all classes with --label-names."
            ) from None
        return [float(index in present) for index in range(len(self.names))]

    def get_model_settings(self) -> dict[str, Any]:
        settings = {"problem_type": self.problem_type, "num_labels": self.num_labels}
        if self.problem_type == REGRESSION:
            return settings
        by_id = dict(enumerate(self.names))
        return {**settings, "id2label": by_id, "label2id": {n: i for i, n in by_id.items()}}


@dataclass(frozen=True, kw_only=True)
class ModelClasses:
    """The classes of a fine-tuned model; empty for a model that has no classifier yet."""

    outputs: tuple[str, ...] = ()
    problem_type: str | None = None

    @property
    def count(self) -> int:
        return len(self.outputs)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs, if they have names."""
        return () if _are_placeholders(self.outputs) else self.outputs

    @property
    def are_numbers(self) -> bool:
        """Whether the model learned plain numbers, so that only the order tells classes apart."""
        return not self.names or self.names == _number_names(self.count)


_NO_CLASSES = ModelClasses()


def get_model_classes(config: Any) -> ModelClasses:
    """The classes of a fine-tuned classifier, from its configuration."""
    outputs = get_output_names(config)
    architectures = getattr(config, "architectures", None) or ()
    is_classifier = any("Classification" in name for name in architectures)
    if _are_placeholders(outputs) and not is_classifier:
        return _NO_CLASSES
    kind = getattr(config, "problem_type", None)
    return ModelClasses(outputs=outputs, problem_type=REGRESSION if len(outputs) == 1 else kind)


def get_output_names(config: Any) -> tuple[str, ...]:
    """A name for each output of a classifier, including placeholders."""
    by_id = getattr(config, "id2label", None) or {}
    return tuple(str(by_id[key]) for key in sorted(by_id))


def _number_names(count: int) -> tuple[str, ...]:
    """Names for classes that the data only numbers."""
    return tuple(str(index) for index in range(count))


def _are_placeholders(names: Sequence[str]) -> bool:
    return all(name == f"LABEL_{index}" for index, name in enumerate(names))


def read_labels(
    splits: Mapping[str, Any], column: str, args: Settings, model: ModelClasses
) -> tuple[LabelSpace, dict[str, bool]]:
    """The checked labels of all splits, and which splits have labels."""
    values, labelled = checks.collect_labels(splits, column)
    first = get_leading_split(values)
    learned = _get_learned(values, model)
    kind = _get_problem_type(values[first], args, learned)
    if kind == REGRESSION:
        checks.check_numbers(values, column)
        if args.problem_type is None and learned.problem_type is None and args.num_labels != 1:
            checks.report_regression(values[first], first, column)
        return LabelSpace(column=column, problem_type=kind), labelled
    names = get_class_names(splits[first], column)
    read = _read_multi_label if kind == MULTI else read_classes
    if kind == SINGLE:
        values = {split: [[value] for value in items] for split, items in values.items()}
    return read(values, column, names, args, model, is_head=is_row_stream(splits[first])), labelled


def read_classes(
    values: Mapping[str, list[list[Any]]],
    column: str,
    names: tuple[str, ...] | None,
    args: Settings,
    model: ModelClasses,
    *,
    is_head: bool = False,
) -> LabelSpace:
    """One class per item, for rows of items: a row's single label, or the tags of its words.

    ``is_head``: these are only the first rows, of which more may follow with other classes.
    """
    split, learned = get_leading_split(values), _get_learned(values, model)
    _check_contradiction(args, learned)
    rows = values[split]
    first = next((item for row in rows for item in row), None)
    if isinstance(first, (list, tuple, dict, float)) or first is None:
        raise DataError(
            f"The labels of {split} contain {first!r}, which is not a class: classes are strings "
            "or integers from 0 up."
        )
    texts = {str(item) for row in rows for item in row} if isinstance(first, str) else None
    if is_head and not args.label_names and names is None:
        learned = _choose_known(texts, model) or learned
    chosen, ids = _choose_classes(
        texts, names, model, learned, lambda: args.num_labels or checks.count_classes(rows, split),
        given=args.label_names,
    )  # fmt: skip
    if is_head and not (args.label_names or names or learned.count or args.num_labels):
        get_logger().info("labels    %s, found in the first rows", ", ".join(chosen))
    checks.check_count(len(chosen), args, split)
    if len(chosen) < 2:
        # A head with one output would mean regression.
        warn("All rows have the same label, %s: there is nothing to learn.", chosen[0])
        chosen = (*chosen, f"not {chosen[0]}")
    space = LabelSpace(column=column, problem_type=SINGLE, names=chosen, ids=ids)
    _check_known(values, space, args, learned, names)
    return space


def _choose_known(texts: set[str] | None, model: ModelClasses) -> ModelClasses | None:
    """The model's classes, if the labels of a stream's first rows are among them."""
    is_known = texts <= set(model.names) if texts is not None else bool(model.count)
    return model if is_known and model.count > 1 else None


def get_leading_split(values: Mapping[str, Any]) -> str:
    """The split that determines which labels exist."""
    return "train" if "train" in values else next(iter(values))


def _get_learned(values: Mapping[str, Any], model: ModelClasses) -> ModelClasses:
    """The classes that the data must match: none when training, since the head may be replaced."""
    return _NO_CLASSES if "train" in values else model


def _get_problem_type(values: Sequence[Any], args: ModelArguments, learned: ModelClasses) -> str:
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
    return REGRESSION if args.num_labels == 1 and isinstance(values[0], int) else SINGLE


def _read_multi_label(
    values: Mapping[str, list[Any]],
    column: str,
    names: tuple[str, ...] | None,
    args: Settings,
    model: ModelClasses,
    *,
    is_head: bool = False,
) -> LabelSpace:
    learned = _get_learned(values, model)
    _check_contradiction(args, learned)
    checks.check_lists(values, column)
    rows = values[get_leading_split(values)]
    items = [item for row in rows for item in row]
    if not items:
        raise DataError("The labels are lists, but every list is empty.")
    is_multi_hot = names is None and _is_multi_hot(rows, learned.count)
    texts = {str(item) for item in items} if isinstance(items[0], str) else None
    # If the model knows all of these labels, they are a part of its own.
    known = model if texts is not None and texts <= set(model.names) else learned
    size = len(rows[0]) if is_multi_hot else args.num_labels
    chosen, ids = _choose_classes(
        texts, names, model, known, lambda: size or max(items) + 1, given=args.label_names
    )
    if is_head and not (args.label_names or names or known.count or args.num_labels):
        get_logger().info("labels    %s, found in the first rows", ", ".join(chosen))
    space = LabelSpace(
        column=column, problem_type=MULTI, names=chosen, ids=ids, is_multi_hot=is_multi_hot
    )
    _check_known(values, space, args, learned, names)
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


def _choose_classes(
    texts: Iterable[str] | None,
    declared: tuple[str, ...] | None,
    model: ModelClasses,
    learned: ModelClasses,
    count_numbers: Callable[[], int],
    *,
    given: Sequence[str] | None,
) -> tuple[tuple[str, ...], dict[Any, int]]:
    """The classes, and the ids of texts, of indices of the declared names or of plain numbers."""
    if given and not learned.count:
        keys: Iterable[Any] = given if texts is not None else range(len(given))
        return tuple(given), {key: index for index, key in enumerate(keys)}
    if texts is not None:
        chosen = _order(sort_classes(set(texts)), model, learned)
        return chosen, {name: index for index, name in enumerate(chosen)}
    if declared is None:
        count = learned.count or count_numbers()
        chosen = model.names if model.count == count and model.names else _number_names(count)
        return chosen, {index: index for index in range(count)}
    if learned.count and model.are_numbers and not set(declared) <= set(model.outputs):
        # The model knows its classes only as numbers, so only numbers can be compared.
        chosen = declared if len(declared) == model.count else _number_names(model.count)
        return chosen, {index: index for index in range(model.count)}
    chosen = _order(declared, model, learned)
    return chosen, {i: chosen.index(name) for i, name in enumerate(declared) if name in chosen}


def sort_classes(names: set[str]) -> tuple[str, ...]:
    """In alphabetical order; numbers by their size."""
    are_numbers = all(name.lstrip("-").isdigit() for name in names)
    return tuple(sorted(names, key=int if are_numbers else str))


def _order(names: tuple[str, ...], model: ModelClasses, learned: ModelClasses) -> tuple[str, ...]:
    """The classes in the model's order, if they are its classes or have to be."""
    return model.outputs if learned.count or set(names) == set(model.names) else names


def _check_contradiction(args: ModelArguments, learned: ModelClasses) -> None:
    """Check --num-labels against the classes of the model being evaluated."""
    if learned.count and args.num_labels not in (None, learned.count):
        raise DataError(
            f"--num-labels {args.num_labels} contradicts the model, which was trained for "
            f"{learned.count} labels: omit the flag."
        )


def _check_known(
    values: Mapping[str, list[Any]],
    space: LabelSpace,
    args: ModelArguments,
    learned: ModelClasses,
    declared: Sequence[str] | None,
) -> None:
    """Refuse a label outside the space; ``declared`` are the data's own names for its numbers."""
    for split, number, value in checks.iterate_labels(values):
        if space.is_multi_hot:
            problem = None if len(value) == space.num_labels else value
        else:
            problem = next((item for item in value if item not in space.ids), None)
        if problem is None:
            continue
        place = f"{split}, row {number}: the label {problem!r} in the column {space.column}"
        known = list_first(space.names)
        if space.is_multi_hot:
            known = f"lists of {space.num_labels} numbers"
        if learned.count:
            is_named = declared and isinstance(problem, int) and 0 <= problem < len(declared)
            name = f" ({declared[problem]})" if declared and is_named else ""
            raise DataError(
                f"{place}{name} is unknown to the model, which was trained for {known}."
            )
        if not space.is_multi_hot and not isinstance(problem, str):
            reason = f" (--num-labels {args.num_labels})" if args.num_labels else ""
            known = f"0 to {len(space.ids) - 1}{reason}"
        if "train" in values and split != "train" and args.num_labels is None:
            raise DataError(
                f"{place} does not occur in the training data, whose labels are {known}."
            )
        raise DataError(f"{place} is out of range: the labels are {known}.")
