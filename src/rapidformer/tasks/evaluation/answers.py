"""Turn logits into answers: the best spans of every window, merged per question, and scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.tasks.base import PreparedData, Record
from rapidformer.tasks.metrics.squad import AnswerScores
from rapidformer.tasks.metrics.tables import ReportTable
from rapidformer.tasks.metrics.tally import Tally
from rapidformer.tasks.rows.rows import get_column, get_column_names, take_rows
from rapidformer.tasks.text.windows import read_texts

if TYPE_CHECKING:
    import numpy as np
    import torch

# A score, and the first and last character of the span in the context.
Candidate = tuple[float, int, int]


def find_best_spans(
    starts: torch.Tensor, ends: torch.Tensor, mask: torch.Tensor, count: int
) -> list[Record]:
    """Per window, the best start and end tokens inside the context, and the no-answer score."""
    import torch

    outside = mask == 0
    null = (starts[:, 0] + ends[:, 0]).cpu().numpy()
    width = min(count, starts.shape[1])
    top = []
    for logits in (starts, ends):
        values, places = logits.masked_fill(outside, -torch.inf).topk(width, dim=1)
        top.append((places.cpu().numpy(), values.cpu().numpy()))
    return [
        {
            "first": top[0][0][row],
            "first_score": top[0][1][row],
            "last": top[1][0][row],
            "last_score": top[1][1][row],
            "null": float(null[row]),
        }
        for row in range(len(null))
    ]


def compute_window_losses(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Per window, the mean cross entropy of the answer's first and its last token.

    Only real tokens compete. In the models' own loss padding does too, so it depends on the longest
    row of a batch.
    """
    is_padding = batch["attention_mask"] == 0
    first = _compare(output.start_logits, batch["start_positions"], is_padding)
    last = _compare(output.end_logits, batch["end_positions"], is_padding)
    return (first + last) / 2


def _compare(logits: torch.Tensor, places: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each row, by methods of tensors: this file must not import torch."""
    scores = logits.float().masked_fill(is_padding, float("-inf"))
    return scores.logsumexp(dim=1) - scores.gather(1, places[:, None])[:, 0]


def join_windows(
    records: Sequence[Record], windows: Any, questions: int, extras: Mapping[str, Any]
) -> list[tuple[list[Candidate], float]]:
    """Per question, its best spans over all windows (in characters), and the no-answer score."""
    longest = extras["max_answer_length"]
    candidates: list[list[Candidate]] = [[] for _ in range(questions)]
    null = [float("inf")] * questions
    for record, window in zip(records, windows, strict=True):
        owner = window["example"]
        null[owner] = min(null[owner], record["null"])
        scores = record["first_score"][:, None] + record["last_score"][None, :]
        lengths = record["last"][None, :] - record["first"][:, None] + 1
        candidates[owner] += _valid_spans(
            record, scores, (lengths > 0) & (lengths <= longest), window
        )
    count = extras["n_best"]
    return [
        (sorted(spans, key=lambda span: -span[0])[:count], none)
        for spans, none in zip(candidates, null, strict=True)
    ]


def choose_answer(
    candidates: tuple[list[Candidate], float], context: str, can_abstain: bool
) -> dict[str, Any]:
    """The most likely candidate of a question; an empty string if that is no answer."""
    import numpy as np

    spans, null = candidates
    scores = [score for score, _, _ in spans]
    options: list[Candidate] = list(spans)
    if can_abstain or not spans:
        options.append((null, 0, 0))
        scores.append(null)
    best = int(np.argmax(scores))
    weights = np.exp(np.array(scores) - max(scores))
    _, start, end = options[best]
    return {
        "answer": context[start:end],
        "start": start,
        "end": end,
        "score": round(float(weights[best] / weights.sum()), 6),
    }


def _valid_spans(
    record: Record, scores: np.ndarray, fits: np.ndarray, window: Mapping[str, Any]
) -> list[Candidate]:
    import numpy as np

    rows, columns = np.nonzero(fits & np.isfinite(scores))
    return [
        (
            float(scores[i, j]),
            window["starts"][record["first"][i]],
            window["ends"][record["last"][j]],
        )
        for i, j in zip(rows, columns, strict=True)
    ]


class AnswerTally(Tally):
    """Records of windows. The windows of a question follow each other, so only one question is
    open at a time; it is scored when the next one begins.
    """

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

    def score(self) -> dict[str, float]:
        self._close()
        return self._scores.score()

    def tables(self) -> list[ReportTable]:
        return self._scores.tables()

    # Many rows are read at once: one by one, reading them takes longer than the model.

    def _read_windows(self, count: int) -> list[dict[str, Any]]:
        part = take_rows(self._windows, self._next_window, count)
        self._next_window += count
        names = get_column_names(part)
        columns = [get_column(part, name) for name in names]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _read_examples(self, first: int, last: int) -> None:
        part = take_rows(self._rows, first, last - first + 1)
        names = (self._extras["columns"][1], self._extras["answers"])
        texts, answers = (get_column(part, name) for name in names)
        pairs = zip(texts, answers, strict=True)
        self._examples.update(zip(range(first, last + 1), pairs, strict=True))

    def _close(self) -> None:
        """Score the open question, whose windows are complete."""
        if self._question is None:
            return
        windows = [{**window, "example": 0} for _, window in self._open]
        records = [dict(record) for record, _ in self._open]
        (candidates,) = join_windows(records, windows, 1, self._extras)
        context, answers = self._examples.pop(self._question)
        chosen = choose_answer(candidates, context, self._extras["can_abstain"])
        place = f"{self._split}, row {self._question + 1}"
        wanted = read_texts(answers, place, self._extras["answers"])
        self._scores.add(chosen["answer"], wanted)
        self.examples += 1
        self._question, self._open = None, []
