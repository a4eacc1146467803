"""Score answers while the windows of the questions arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rapidformer.tasks.base import PreparedData
from rapidformer.tasks.evaluation.answers import choose_answer, join_windows
from rapidformer.tasks.metrics.squad import AnswerScores
from rapidformer.tasks.metrics.tables import ReportTable
from rapidformer.tasks.metrics.tally import Record, Tally
from rapidformer.tasks.rows.rows import get_column, get_column_names, take_rows
from rapidformer.tasks.text.windows import read_texts


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
        self._open: list[tuple[Record, Mapping[str, Any]]] = []

    def add(self, records: Sequence[Record]) -> None:
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
        found = zip(texts, answers, strict=True)
        self._examples.update(zip(range(first, last + 1), found, strict=True))

    def _close(self) -> None:
        """Score the open question, whose windows are complete."""
        if self._question is None:
            return
        windows = [{**window, "example": 0} for _, window in self._open]
        records = [dict(record) for record, _ in self._open]
        (candidates,) = join_windows(records, windows, 1, self._extras)
        context, answers = self._examples.pop(self._question)
        found = choose_answer(candidates, context, self._extras["can_abstain"])
        place = f"{self._split}, row {self._question + 1}"
        wanted = read_texts(answers, place, self._extras["answers"])
        self._scores.add(found["answer"], wanted)
        self.examples += 1
        self._question, self._open = None, []
