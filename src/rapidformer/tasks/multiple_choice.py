"""Choose the right one of several endings or answers: a batch is [rows, choices, tokens]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import DataError
from rapidformer.tasks.base import PreparedData, Record, Tables, check_row_texts
from rapidformer.tasks.labels.checks import is_unlabelled
from rapidformer.tasks.labels.labels import SINGLE
from rapidformer.tasks.metrics.tally import ChoiceTally, Tally
from rapidformer.tasks.rows.columns import ColumnRole, check_given, describe_missing, find_column
from rapidformer.tasks.rows.rows import get_column, get_column_names, to_rows
from rapidformer.tasks.sequence_classification import Classifier, describe_record
from rapidformer.tasks.text.text import TextParts, TextTask

_LISTS = ("choices", "endings", "options", "candidates", "answers")
CONTEXT = ColumnRole("context", "context_column", "the text before the choices", (
    "sent1", "article", "context", "passage", "ctx", "ctx_a", "premise", "goal", "startphrase",
    "question", "sentence", "text",
))  # fmt: skip
QUESTION = ColumnRole(
    "question", "question_column", "a question, or the beginning of every choice",
    ("sent2", "ctx_b", "question"), required=False,
)  # fmt: skip
CHOICES = ColumnRole(
    "choices", "choice_columns", "the choices: one column each, or a column of lists",
    ("ending0 ending1 ...", "choice1 choice2 ...", "option1 ...", "answer0 ...", "sol1 sol2",
     *_LISTS),
)  # fmt: skip
LABEL = ColumnRole(
    "label", "label_column", "the right choice: its number from 0, its letter or its text",
    ("label", "labels", "answer", "answerKey", "answer_idx", "correct", "target"),
)  # fmt: skip
_NUMBERED = re.compile(r"(ending|choice|option|answer|sol|hypothesis)_?(\d+)$")


@dataclass(frozen=True, kw_only=True)
class _Columns:
    context: str
    question: str | None
    choices: tuple[str, ...]
    """Several columns with one choice each, or one column of lists."""
    label: str | None


class MultipleChoice(TextTask, Classifier):
    name = "multiple_choice"
    description = "choose the right one of several endings or answers"
    columns = (CONTEXT, QUESTION, CHOICES, LABEL)
    auto_class = "AutoModelForMultipleChoice"
    streams = True
    answer_keys = frozenset({"choice", "text", "score", "scores"})
    metrics = ("accuracy", "loss")

    needs_rows = "a context and choices"

    def choose_columns(self, rows: Any, args: Settings, *, has_answers: bool) -> _Columns:
        available = get_column_names(rows)
        choices = _find_choices(available, args)
        label = str(find_column(LABEL, available, args, taken=choices)) if has_answers else None
        context = str(find_column(CONTEXT, available, args, taken=(*choices, label)))
        question = find_column(QUESTION, available, args, taken=(*choices, label, context))
        return _Columns(context=context, question=question, choices=choices, label=label)

    def encode_tables(self, parts: TextParts, tables: Tables, columns: _Columns) -> PreparedData:
        labels: dict[str, list[int] | None] = {}
        features = {}
        count = None
        for split, rows in tables.items():
            choices = _read_choices(rows, split, columns)
            count = _check_counts(choices, split, count)
            has_label = columns.label in get_column_names(rows)
            labels[split] = _read_labels(rows, split, columns, choices) if has_label else None
            if labels[split] is None and split != "test":
                raise DataError(f"{split} has no labels in the column {columns.label}.")
            has_labels = labels[split] is not None
            features[split] = _encode(rows, split, columns, count, parts, has_labels=has_labels)
        labelled = {split: numbers is not None for split, numbers in labels.items()}
        extras = {"rows": tables, "columns": columns, "problem_type": SINGLE}
        return parts.prepare(features, {**extras, "labelled": labelled})

    def encode_input(
        self, parts: TextParts, table: list[Record], columns: _Columns
    ) -> PreparedData:
        count = _check_counts(_read_choices(table, "input", columns), "input", None)
        features = _encode(table, "input", columns, count, parts, has_labels=False)
        extras = {"rows": {"test": table}, "columns": columns, "problem_type": SINGLE}
        return parts.prepare_input(features, extras)

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        return ChoiceTally()

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        row, columns = prepared.extras["rows"][split][number], prepared.extras["columns"]
        (texts,) = _read_choices([row], split, columns)
        shown = describe_record(record, SINGLE, [str(place) for place in range(len(texts))])
        choice = int(shown["label"])
        answer = {columns.context: row[columns.context], "choice": choice, "text": texts[choice]}
        answer |= {"score": shown["score"], "scores": list(shown["scores"].values())}
        return answer | ({"expected": record["label"]} if "label" in record else {})


def _find_choices(available: Sequence[str], args: DataArguments) -> tuple[str, ...]:
    if args.choice_columns:
        return tuple(check_given(name, CHOICES.flag, available) for name in args.choice_columns)
    groups: dict[str, list[tuple[int, str]]] = {}
    for name in available:
        match = _NUMBERED.match(name)
        if match:
            groups.setdefault(match[1], []).append((int(match[2]), name))
    for numbered in groups.values():
        if len(numbered) > 1:
            return tuple(name for _, name in sorted(numbered))
    for name in _LISTS:
        if name in available:
            return (name,)
    raise DataError(describe_missing([CHOICES], available))


def _read_choices(rows: Any, split: str, columns: _Columns) -> list[list[str]]:
    if len(columns.choices) > 1:
        texts = [check_row_texts(get_column(rows, c), c, split) for c in columns.choices]
        return [list(row) for row in zip(*texts, strict=True)]
    result = []
    for number, value in enumerate(get_column(rows, columns.choices[0]), start=1):
        # CommonsenseQA and similar datasets: {"label": ["A", ...], "text": [...]}.
        items = value.get("text") if isinstance(value, dict) else value
        if not isinstance(items, (list, tuple)) or len(items) < 2:
            raise DataError(
                f"{split}, row {number}: the column {columns.choices[0]} must hold a list of at "
                f"least two choices, but holds {str(value)[:60]!r}."
            )
        result.append([str(item) for item in items])
    return result


def _check_counts(choices: Sequence[Sequence[str]], split: str, count: int | None) -> int:
    wanted = count or len(choices[0])
    for number, row in enumerate(choices, start=1):
        if len(row) != wanted:
            raise DataError(
                f"{split}, row {number}: {len(row)} choices, but the first row has {wanted}; "
                "every row needs the same number."
            )
    return wanted


def _read_labels(
    rows: Any, split: str, columns: _Columns, choices: Sequence[Sequence[str]]
) -> list[int] | None:
    column = str(columns.label)
    values = get_column(rows, column)
    if split == "test" and is_unlabelled(values):
        return None
    cells = get_column(rows, columns.choices[0])
    labels = []
    for number, (value, texts, cell) in enumerate(zip(values, choices, cells, strict=True), 1):
        label = _read_label(value, texts, cell.get("label") if isinstance(cell, dict) else None)
        if label is None:
            raise DataError(
                f"{split}, row {number}: the label {value!r} in the column {column} is none of "
                f"the {len(texts)} choices: use a number from 0 to {len(texts) - 1}, a letter or "
                "the text of a choice."
            )
        labels.append(label)
    return labels


def _read_label(value: Any, texts: Sequence[str], keys: Sequence[str] | None) -> int | None:
    if isinstance(value, str):
        if keys and value in keys:
            return list(keys).index(value)
        if value in texts:
            return list(texts).index(value)
        if len(value) == 1 and value.isascii() and value.isalpha():
            value = ord(value.upper()) - ord("A")
        elif value.isdigit():
            value = int(value)
    if isinstance(value, int) and 0 <= value < len(texts):
        return int(value)
    return None


def _encode(
    rows: Any, split: str, columns: _Columns, count: int, parts: TextParts, *, has_labels: bool
) -> Any:
    """``count`` is the number of choices of every row."""

    def encode(values: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        part = to_rows(values)
        choices = _read_choices(part, split, columns)
        _check_counts(choices, split, count)
        contexts = check_row_texts(values[columns.context], columns.context, split, indices[0])
        first = [context for context in contexts for _ in range(count)]
        if columns.question:
            starts = [f"{text or ''} " for text in values[columns.question]]
        else:
            starts = [""] * len(indices)
        second = [
            (start + choice).strip() if start else choice
            for start, texts in zip(starts, choices, strict=True)
            for choice in texts
        ]
        encoded = parts.tokenizer(first, second, truncation=True, max_length=parts.length)
        result = {
            name: [ids[start : start + count] for start in range(0, len(ids), count)]
            for name, ids in encoded.items()
        }
        if has_labels:
            result["labels"] = _read_labels(part, split, columns, choices) or []
        return result

    return parts.map_rows(rows, encode, "choices", columns, has_labels, is_one_to_one=True)
