"""Rows of texts that belong together: a query, documents that fit it or do not, scores.

Columns are found by name, or else by their order: the first text is the query, the second one fits
it, all others do not. A row with several positives is trained on once for each of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rapidformer.config import Settings
from rapidformer.errors import DataError
from rapidformer.tasks.rows.columns import ColumnRole, check_given, describe_missing, find_column
from rapidformer.tasks.rows.rows import get_column_names, take_first

QUERY = ColumnRole(
    "query", "text_column", "the query, or the first of two texts",
    ("anchor", "query", "question", "sentence1", "sentence_A", "sentence_a", "premise", "text1",
     "text_a", "messages", "title"),
)  # fmt: skip
POSITIVE = ColumnRole(
    "positive", "text_pair_column", "a text that fits the query, or a list of them",
    ("positive", "positives", "pos", "pos_doc", "positive_messages", "document", "documents",
     "passage", "answer", "response", "sentence2", "sentence_B", "sentence_b", "hypothesis",
     "text2", "text_b", "context"),
)  # fmt: skip
NEGATIVE = ColumnRole(
    "negative", "negative_columns", "texts that do not fit: columns, or a column of lists",
    ("negative", "negatives", "negative_1 negative_2 ...", "neg", "neg_doc", "negative_messages",
     "hard_negatives"), required=False,
)  # fmt: skip
SCORE = ColumnRole(
    "score", "label_column", "how well the texts fit: a number, or one for each document",
    ("score", "scores", "label", "labels", "similarity", "similarity_score", "relatedness_score",
     "margin"), required=False,
)  # fmt: skip
_NEGATIVE = re.compile(r"(hard_)?neg(ative)?s?(_doc|_messages)?(_?\d+)?$", re.IGNORECASE)


@dataclass(frozen=True)
class Item:
    """A query with its documents."""

    where: str
    """Its split and row, for errors."""
    query: str
    documents: tuple[str, ...] = ()
    """First those that fit, then the hard negatives."""
    positives: int = 1
    """How many fit."""
    scores: tuple[float, ...] = ()
    """None, one, one for each negative, or one for each document."""


@dataclass(frozen=True, kw_only=True)
class PairColumns:
    """The columns of the data."""

    query: str
    positive: str
    negatives: tuple[str, ...]
    score: str | None

    def get_names(self) -> list[str]:
        """All of them."""
        return [self.query, self.positive, *self.negatives, *filter(None, [self.score])]

    def read(
        self, columns: dict[str, list[Any]], indices: Sequence[int], split: str, *, joins: bool
    ) -> list[Item]:
        """The items of some rows, one for each positive or, if it ``joins`` them, for each row."""
        items: list[Item] = []
        for place, index in enumerate(indices):
            row = {name: columns[name][place] for name in self.get_names()}
            items += self._read_row(row, f"{split}, row {index + 1}", joins=joins)
        return items

    def _read_row(self, row: dict[str, Any], where: str, *, joins: bool) -> list[Item]:
        queries = _read_texts(row[self.query], self.query, where)
        if len(queries) > 1:
            raise DataError(
                f"{where}: the column {self.query} must hold one text, not {len(queries)}."
            )
        positives = _read_texts(row[self.positive], self.positive, where)
        negatives = [
            text
            for name in self.negatives
            if not _is_nothing(row[name])
            for text in _read_texts(row[name], name, where)
        ]
        scores: tuple[float, ...] = ()
        if self.score is not None:
            scores = _read_scores(row[self.score], self.score, where)
            _check_number(len(scores), len(positives) + len(negatives), self.score, where)
        if joins or len(scores) > 1:
            return [Item(where, queries[0], (*positives, *negatives), len(positives), scores)]
        return [Item(where, queries[0], (text, *negatives), 1, scores) for text in positives]


def find_pair_columns(rows: Any, args: Settings, *, has_answers: bool = True) -> PairColumns:
    """The columns by their flags, their names, or their order."""
    available = get_column_names(rows)
    negatives = _find_negatives(available, args)
    score = find_column(SCORE, available, args, taken=negatives) if has_answers else None
    taken = (*negatives, score)
    try:
        query = str(find_column(QUERY, available, args, taken=taken))
        positive = str(find_column(POSITIVE, available, args, taken=(*taken, query)))
    except DataError:
        given = (args.text_column, args.text_pair_column, args.negative_columns)
        ordered = [] if any(given) else _list_text_columns(rows, (score,))
        if len(ordered) < 2:
            if not any(given):
                free = [name for name in available if name not in taken]
                missing = [role for role in (QUERY, POSITIVE) if not _has(role, free)]
                raise DataError(describe_missing(missing, available)) from None
            raise
        query, positive, *rest = ordered
        negatives = tuple(rest)
    return PairColumns(query=query, positive=positive, negatives=negatives, score=score)


def _has(role: ColumnRole, available: Sequence[str]) -> bool:
    names = {name.lower() for name in available}
    return any(name.lower() in names for name in role.candidates)


def _find_negatives(available: Sequence[str], args: Settings) -> tuple[str, ...]:
    if args.negative_columns:
        return tuple(check_given(name, NEGATIVE.flag, available) for name in args.negative_columns)
    return tuple(name for name in available if _NEGATIVE.match(name))


def _list_text_columns(rows: Any, taken: Sequence[str | None]) -> list[str]:
    first: dict[str, Any] = next(iter(take_first(rows, 1)), {})
    return [
        name
        for name, value in first.items()
        if name not in taken and (isinstance(value, str) or _is_list_of_texts(value))
    ]


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)


def _is_nothing(value: Any) -> bool:
    return value is None or value == []


def _read_texts(value: Any, column: str, where: str) -> list[str]:
    """One text or several: strings, messages, or dictionaries with a text."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        texts = ["\n".join(str(message.get("content") or "") for message in value)]
    elif isinstance(value, list):
        texts = [text for part in value for text in _read_texts(part, column, where)]
    elif isinstance(value, dict) and isinstance(value.get("text"), str):
        texts = [value["text"]]
    elif isinstance(value, (str, int, float)):
        texts = [str(value)]
    else:
        actual = "nothing" if value is None else f"a {type(value).__name__}"
        raise DataError(f"{where}: the column {column} must hold text, not {actual}.")
    if not texts:
        raise DataError(f"{where}: the column {column} has no text.")
    if not all(text.strip() for text in texts):
        raise DataError(f"{where}: the column {column} has an empty text.")
    return texts


def _read_scores(value: Any, column: str, where: str) -> tuple[float, ...]:
    values = value if isinstance(value, (list, tuple)) else [value]
    try:
        scores = tuple(float(number) for number in values)
    except (TypeError, ValueError):
        scores = ()
    if not scores or not all(map(math.isfinite, scores)):
        raise DataError(
            f"{where}: the column {column} must hold a number, but holds {str(value)[:60]!r}."
        )
    return scores


def _check_number(actual: int, documents: int, column: str | None, where: str) -> None:
    if actual not in (1, documents, documents - 1):
        raise DataError(
            f"{where}: the column {column} has {actual} numbers for {documents} documents: give "
            "one for each document, or one for each negative."
        )
