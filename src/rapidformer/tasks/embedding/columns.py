"""Rows of texts that belong together: a query, documents that fit it or do not, scores.

Columns are found by name, or else by their order: the first text is the query, the second one fits
it, all others do not. A row with several positives is trained on once for each of them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rapidformer.config import Settings
from rapidformer.errors import DataError
from rapidformer.tasks.rows.columns import ColumnRole, check_given, find_column, find_columns
from rapidformer.tasks.rows.rows import get_column, get_column_names, take_first

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
    query: str
    positive: str
    negatives: tuple[str, ...]
    score: str | None

    def get_names(self) -> list[str]:
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

    def read_input(self, table: Any) -> list[Item]:
        """The items of rows to predict on, one for each row."""
        values = {name: get_column(table, name) for name in self.get_names()}
        return self.read(values, range(len(table)), "input", joins=True)

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
            if row[name] is not None and row[name] != []
            for text in _read_texts(row[name], name, where)
        ]
        scores: tuple[float, ...] = ()
        if self.score is not None:
            scores = _read_scores(row[self.score], self.score, where)
            documents = len(positives) + len(negatives)
            if len(scores) not in (1, documents, documents - 1):
                raise DataError(
                    f"{where}: the column {self.score} has {len(scores)} numbers for {documents} "
                    "documents: give one for each document, or one for each negative."
                )
        if joins or len(scores) > 1:
            return [Item(where, queries[0], (*positives, *negatives), len(positives), scores)]
        return [Item(where, queries[0], (text, *negatives), 1, scores) for text in positives]


def find_pair_columns(rows: Any, args: Settings, *, has_answers: bool = True) -> PairColumns:
    """The columns by their flags, their names, or their order."""
    available = get_column_names(rows)
    negatives = tuple(name for name in available if _NEGATIVE.match(name))
    if args.negative_columns:
        names = args.negative_columns
        negatives = tuple(check_given(name, NEGATIVE.flag, available) for name in names)
    score = find_column(SCORE, available, args, taken=negatives) if has_answers else None
    given = [name for name in (args.text_column, args.text_pair_column) if name]
    free = [name for name in available if name in given or name not in (*negatives, score)]
    try:
        query, positive = find_columns((QUERY, POSITIVE), free, args).values()
    except DataError:
        ordered = [] if given or args.negative_columns else _list_text_columns(rows, score)
        if len(ordered) < 2:
            raise
        query, positive, *rest = ordered
        negatives = tuple(rest)
    return PairColumns(query=query, positive=positive, negatives=negatives, score=score)


def _list_text_columns(rows: Any, score: str | None) -> list[str]:
    """The columns whose first value is a text or a list of texts."""
    first: dict[str, Any] = next(iter(take_first(rows, 1)), {})
    firsts = {name: v[0] if isinstance(v, list) and v else v for name, v in first.items()}
    return [name for name, v in firsts.items() if name != score and isinstance(v, str)]


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


def group_rows(
    items: Sequence[Item], sizes: Iterable[int], columns: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """The features of each item: its part of the columns, which have ``sizes`` rows for it."""
    features = []
    for item, (start, stop) in zip(items, pairwise(accumulate(sizes, initial=0)), strict=True):
        feature: dict[str, Any] = {name: list(v[start:stop]) for name, v in columns.items()}
        length = (stop - start) * max(map(len, feature["input_ids"]))
        features.append({**feature, "scores": list(item.scores), "length": length})
    return features


def hash_text(text: str) -> int:
    """A number that only equal texts share."""
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
