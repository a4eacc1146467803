"""Cut questions and contexts into windows that fit the model, and locate the answer in each.

From logits to answers: the best spans of every window, merged per question, and scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.errors import DataError
from rapidformer.tasks.base import Batch, PreparedData, Record, check_row_texts
from rapidformer.tasks.metrics.generation import AnswerScores
from rapidformer.tasks.metrics.tally import ReportTable, Tally
from rapidformer.tasks.rows.rows import (
    as_table,
    drop_columns,
    get_column,
    get_column_names,
    take_rows,
    to_rows,
)
from rapidformer.tasks.text.text import TextParts

if TYPE_CHECKING:
    import torch

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
    others = [name for name in get_column_names(encoded) if name not in _WINDOW_COLUMNS]
    return drop_columns(encoded, _WINDOW_COLUMNS), drop_columns(encoded, others)


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


# A score, and the first and last character of the span in the context.
Candidate = tuple[float, int, int]


def find_best_spans(output: Any, mask: torch.Tensor, count: int) -> list[Record]:
    """Per window, the best start and end tokens inside the context, and the no-answer score."""
    starts, ends = output.start_logits.float(), output.end_logits.float()
    columns = {"null": (starts[:, 0] + ends[:, 0]).tolist()}
    for name, logits in (("first", starts), ("last", ends)):
        inside = logits.masked_fill(mask == 0, float("-inf"))
        values, places = inside.topk(min(count, starts.shape[1]), dim=1)
        columns[name], columns[f"{name}_score"] = places.cpu().numpy(), values.cpu().numpy()
    return to_rows(columns)


def compute_window_losses(output: Any, batch: Batch) -> torch.Tensor:
    """Per window, the mean cross entropy of the answer's two ends; padding does not compete."""
    is_padding = batch["attention_mask"] == 0
    first = _compare(output.start_logits, batch["start_positions"], is_padding)
    last = _compare(output.end_logits, batch["end_positions"], is_padding)
    return (first + last) / 2


def _compare(logits: torch.Tensor, places: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each row, by methods of tensors: this file must not import torch."""
    scores = logits.float().masked_fill(is_padding, float("-inf"))
    return scores.logsumexp(dim=1) - scores.gather(1, places[:, None])[:, 0]


def join_windows(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], extras: Mapping[str, Any]
) -> tuple[list[Candidate], float]:
    """A question's best spans over all of its windows (in characters), and the no-answer score."""
    import numpy as np

    candidates: list[Candidate] = []
    for record, window in pairs:
        scores = record["first_score"][:, None] + record["last_score"][None, :]
        first, last = record["first"], record["last"]
        lengths = last[None, :] - first[:, None] + 1
        fits = (lengths > 0) & (lengths <= extras["max_answer_length"]) & np.isfinite(scores)
        candidates += [
            (float(scores[i, j]), window["starts"][first[i]], window["ends"][last[j]])
            for i, j in zip(*np.nonzero(fits), strict=True)
        ]
    best = sorted(candidates, key=lambda span: -span[0])[: extras["n_best"]]
    return best, min(record["null"] for record, _ in pairs)


def choose_answer(
    candidates: tuple[list[Candidate], float], context: str, can_abstain: bool
) -> dict[str, Any]:
    """The most likely candidate of a question; an empty string if that is no answer."""
    import numpy as np

    spans, null = candidates
    options = [*spans, (null, 0, 0)] if can_abstain or not spans else spans
    scores = np.array([score for score, _, _ in options])
    best = int(scores.argmax())
    weights = np.exp(scores - scores.max())
    _, start, end = options[best]
    score = round(float(weights[best] / weights.sum()), 6)
    return {"answer": context[start:end], "start": start, "end": end, "score": score}


class AnswerTally(Tally):
    """Records of windows; a question is scored when the windows of the next one begin."""

    def __init__(self, prepared: PreparedData, split: str) -> None:
        super().__init__()
        self._extras = prepared.extras
        self._rows = prepared.extras["rows"][split]
        self._windows = prepared.extras["windows"][split]
        self._split = split
        self._next_window = 0
        self._scores = AnswerScores()
        self._question: int | None = None
        self._examples: dict[int, tuple[str, Any]] = {}
        """Context and answers of the questions whose windows are arriving."""
        self._open: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        if not records:
            return
        windows = self._read_windows(len(records))
        self._read_examples(windows[0]["example"], windows[-1]["example"])
        for record, window in zip(records, windows, strict=True):
            if window["example"] != self._question:
                self._close()
                self._question = window["example"]
            self._open.append((record, window))
        self.examples -= len(records)  # windows: a question counts when all of them are there

    def score(self) -> dict[str, float]:
        self._close()
        return self._scores.score()

    def tables(self) -> list[ReportTable]:
        self._close()
        return self._scores.tables()

    # Many rows are read at once: one by one, reading them takes longer than the model.

    def _read_windows(self, count: int) -> list[dict[str, Any]]:
        part = take_rows(self._windows, self._next_window, count)
        self._next_window += count
        return to_rows({name: get_column(part, name) for name in get_column_names(part)})

    def _read_examples(self, first: int, last: int) -> None:
        part = take_rows(self._rows, first, last - first + 1)
        names = (self._extras["columns"][1], self._extras["answers"])
        pairs = zip(*(get_column(part, name) for name in names), strict=True)
        self._examples.update(zip(range(first, last + 1), pairs, strict=True))

    def _close(self) -> None:
        """Score the open question, whose windows are complete."""
        if self._question is None:
            return
        candidates = join_windows(self._open, self._extras)
        context, answers = self._examples.pop(self._question)
        chosen = choose_answer(candidates, context, self._extras["can_abstain"])
        place = f"{self._split}, row {self._question + 1}"
        wanted = read_texts(answers, place, self._extras["answers"])
        self._scores.add(chosen["answer"], wanted)
        self.examples += 1
        self._question, self._open = None, []
