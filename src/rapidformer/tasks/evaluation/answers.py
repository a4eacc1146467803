"""Turn logits into answers: the best spans of every window, merged per question, and scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.tasks.base import Batch, PreparedData, Record
from rapidformer.tasks.metrics.generation import AnswerScores
from rapidformer.tasks.metrics.tally import ReportTable, Tally
from rapidformer.tasks.rows.rows import get_column, get_column_names, take_rows, to_rows
from rapidformer.tasks.text.windows import read_texts

if TYPE_CHECKING:
    import torch

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
    records: Sequence[Mapping[str, Any]], windows: Any, questions: int, extras: Mapping[str, Any]
) -> list[tuple[list[Candidate], float]]:
    """Per question, its best spans over all windows (in characters), and the no-answer score."""
    import numpy as np

    candidates: list[list[Candidate]] = [[] for _ in range(questions)]
    null = [float("inf")] * questions
    for record, window in zip(records, windows, strict=True):
        owner = window["example"]
        null[owner] = min(null[owner], record["null"])
        scores = record["first_score"][:, None] + record["last_score"][None, :]
        first, last = record["first"], record["last"]
        lengths = last[None, :] - first[:, None] + 1
        fits = (lengths > 0) & (lengths <= extras["max_answer_length"]) & np.isfinite(scores)
        candidates[owner] += [
            (float(scores[i, j]), window["starts"][first[i]], window["ends"][last[j]])
            for i, j in zip(*np.nonzero(fits), strict=True)
        ]
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
        windows = [{**window, "example": 0} for _, window in self._open]
        records = [record for record, _ in self._open]
        (candidates,) = join_windows(records, windows, 1, self._extras)
        context, answers = self._examples.pop(self._question)
        chosen = choose_answer(candidates, context, self._extras["can_abstain"])
        place = f"{self._split}, row {self._question + 1}"
        wanted = read_texts(answers, place, self._extras["answers"])
        self._scores.add(chosen["answer"], wanted)
        self.examples += 1
        self._question, self._open = None, []
