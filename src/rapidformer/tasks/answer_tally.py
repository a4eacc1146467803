"""Score answers while the windows of the questions arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rapidformer.tasks.answers import choose_answer, join_windows
from rapidformer.tasks.base import PreparedData
from rapidformer.tasks.metrics.squad import AnswerScores
from rapidformer.tasks.metrics.tables import ReportTable
from rapidformer.tasks.metrics.tally import Record, Tally


class AnswerTally(Tally):
    """Records of windows. The windows of a question follow each other, so only one question is
    open at a time; it is scored when the next one begins.
    """

    def __init__(self, prepared: PreparedData, split: str) -> None:
        super().__init__()
        self._extras = prepared.extras
        self._rows = prepared.extras["rows"][split]
        self._windows = prepared.extras["windows"][split]
        self._answers = prepared.extras["answers"][split]
        self._next_window = 0
        self._scores = AnswerScores()
        self._question: int | None = None
        self._open: list[tuple[Record, Mapping[str, Any]]] = []

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            window = self._windows[self._next_window]
            self._next_window += 1
            if window["example"] != self._question:
                self._close()
                self._question = window["example"]
            self._open.append((record, window))

    def score(self) -> dict[str, float]:
        self._close()
        return self._scores.score()

    def tables(self) -> list[ReportTable]:
        return self._scores.tables()

    def _close(self) -> None:
        """Score the open question, whose windows are complete."""
        if self._question is None:
            return
        windows = [{**window, "example": 0} for _, window in self._open]
        records = [dict(record) for record, _ in self._open]
        (candidates,) = join_windows(records, windows, 1, self._extras)
        context = self._rows[self._question][self._extras["columns"][1]]
        found = choose_answer(candidates, context, self._extras["can_abstain"])
        wanted = [text for text, _ in self._answers[self._question]]
        self._scores.add(found["answer"], wanted)
        self.examples += 1
        self._question, self._open = None, []
