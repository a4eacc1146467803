"""Cut questions and contexts into windows that fit the model, and locate the answer in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rapidformer.errors import DataError
from rapidformer.tasks.base import check_row_texts
from rapidformer.tasks.rows.rows import as_table, drop_columns, get_column, keep_columns, take_rows
from rapidformer.tasks.text.text import TextParts

# An answer's text and the position of its first character in the context.
Answer = tuple[str, int]
_WINDOW_COLUMNS = ("example", "starts", "ends")
"""Where a window comes from; they are not fed to the model."""
_PART = 1000
"""Rows that are read at once."""
_STRIDE = 128
"""Default overlap of windows in tokens; never more than half a window."""


def lacks_an_answer(rows: Any, split: str, column: str) -> bool:
    """Whether some question has no answer; reads a part of the rows at a time."""
    rows = as_table(rows)
    for start in range(0, len(rows), _PART):
        values = get_column(take_rows(rows, start, _PART), column)
        for number, value in enumerate(values, start=start + 1):
            if not read_texts(value, f"{split}, row {number}", column):
                return True
    return False


def read_texts(value: Any, place: str, column: str) -> list[str]:
    """The texts of the answers in a cell; ``place`` names the row in errors."""
    return [text for text, _ in _as_pairs(value, place, column) if text]


def _place_answers(value: Any, context: str, place: str, column: str) -> list[Answer]:
    answers = []
    for text, start in _as_pairs(value, place, column):
        if not text:
            continue
        if start is None or context[start : start + len(text)] != text:
            start = context.find(text)
        if start < 0:
            raise DataError(
                f"{place}: the answer {text[:60]!r} is not in its context; an answer must be "
                "an exact copy of a part of it."
            )
        answers.append((text, start))
    return answers


def _as_pairs(value: Any, place: str, column: str) -> list[tuple[str, int | None]]:
    """The answers in a cell, in any of the usual formats."""
    if value is None:
        return []
    if isinstance(value, str):
        return [(value, None)]
    if isinstance(value, dict) and "text" in value:
        texts, starts = value["text"] or [], value.get("answer_start")
        if isinstance(texts, str):
            texts, starts = [texts], [starts]
        starts = starts if starts else [None] * len(texts)
        return list(zip(texts, starts, strict=True))
    if isinstance(value, (list, tuple)):
        return [pair for item in value for pair in _as_pairs(item, place, column)]
    raise DataError(
        f"{place}: the column {column} holds {str(value)[:60]!r}, but must hold "
        '{"text": [...], "answer_start": [...]}, a string or a list of strings.'
    )


def encode_windows(
    rows: Any, split: str, names: Sequence[str], parts: TextParts
) -> tuple[Any, Any | None]:
    """The windows of questions, contexts and answers and, except in training, their places."""
    tokenizer, stride = parts.tokenizer, parts.args.doc_stride
    room = parts.length - tokenizer.num_special_tokens_to_add(pair=True)
    stride = min(_STRIDE, room // 2) if stride is None else stride

    def encode(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        questions = check_row_texts(columns[names[0]], names[0], split, indices[0])
        contexts = check_row_texts(columns[names[1]], names[1], split, indices[0])
        questions = _shorten(questions, tokenizer, room - stride - 1)
        encoded = tokenizer(
            questions, contexts, truncation="only_second", max_length=parts.length, stride=stride,
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        owners = encoded.pop("overflow_to_sample_mapping")
        offsets = encoded.pop("offset_mapping")
        masks = [[int(s == 1) for s in encoded.sequence_ids(i)] for i in range(len(owners))]
        result = dict(encoded)
        if len(names) > 2:
            answers = [
                _place_answers(value, context, f"{split}, row {number + 1}", names[2])
                for number, value, context in zip(indices, columns[names[2]], contexts, strict=True)
            ]
            spans = [
                _find_span(answers[owner], offsets[i], masks[i]) for i, owner in enumerate(owners)
            ]
            result["start_positions"] = [first for first, _ in spans]
            result["end_positions"] = [last for _, last in spans]
        if split != "train":
            result["context_mask"] = masks
            result["example"] = [indices[owner] for owner in owners]
            result["starts"] = [[first for first, _ in offset] for offset in offsets]
            result["ends"] = [[last for _, last in offset] for offset in offsets]
        return result

    encoded = parts.map_rows(rows, encode, "windows", tuple(names), stride, split)
    if split == "train":
        return encoded, None
    return drop_columns(encoded, _WINDOW_COLUMNS), keep_columns(encoded, _WINDOW_COLUMNS)


def _shorten(questions: list[str], tokenizer: Any, room: int) -> list[str]:
    """Cut questions that would leave less room for the context than a window's stride."""
    offsets = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True)
    return [
        text[: spans[room - 1][1]] if len(spans) > room else text
        for text, spans in zip(questions, offsets["offset_mapping"], strict=True)
    ]


def _find_span(
    answers: Sequence[Answer], offsets: Sequence[tuple[int, int]], mask: Sequence[int]
) -> tuple[int, int]:
    """First and last token of the answer in this window; (0, 0) if it is not entirely inside."""
    if not answers:
        return 0, 0
    text, start = answers[0]
    end = start + len(text)
    first = last = None
    for position, (begin, stop) in enumerate(offsets):
        if not mask[position] or begin == stop:
            continue
        if begin <= start < stop:
            first = position
        if begin < end <= stop:
            last = position
    return (first, last) if first is not None and last is not None else (0, 0)
