"""Exact match and F1 of answers, in percent, by SQuAD's rules (both of its versions)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rapidformer.tasks.metrics.tables import ReportTable, ScoreTable

_PARTS = ("has_answer", "no_answer")


class AnswerScores:
    """Running scores of answers; an empty answer is right if the question has no answer."""

    def __init__(self) -> None:
        import torch
        from torchmetrics.text import SQuAD

        self._parts: dict[str, Any] = {name: SQuAD().set_dtype(torch.float64) for name in _PARTS}

    def add(self, answer: str, wanted: Sequence[str]) -> None:
        """Add the answer to one question, and the right answers."""
        prediction = {"id": "0", "prediction_text": answer}
        # An unanswerable question is scored as if its answer were the empty string.
        target: Any = {"id": "0", "answers": {"text": list(wanted) or [""], "answer_start": [0]}}
        self._parts["has_answer" if wanted else "no_answer"].update([prediction], [target])

    def score(self) -> dict[str, float]:
        """Scores over all questions and, if there are both, by whether there is an answer."""
        result = self._read(*_PARTS)
        parts = [name for name in _PARTS if self._count(name)]
        for name in parts if len(parts) == 2 else ():
            result |= {f"{name}_{key}": value for key, value in self._read(name).items()}
        return result

    def tables(self) -> list[ReportTable]:
        """A row for questions with an answer and one for those without, if there are both."""
        titles = {"has_answer": "has an answer", "no_answer": "has no answer"}
        rows: dict[str, Mapping[str, float]] = {
            title: {**self._read(name), "support": self._count(name)}
            for name, title in titles.items()
            if self._count(name)
        }
        if len(rows) < 2:
            return []
        every = {"all": {**self._read(*_PARTS), "support": self._count(*_PARTS)}}
        return [ScoreTable(key="questions", title="by question", rows=rows, averages=every)]

    def _count(self, *parts: str) -> int:
        return sum(int(self._parts[part].total) for part in parts)

    def _read(self, *parts: str) -> dict[str, float]:
        exact = sum(float(self._parts[part].exact_match) for part in parts)
        f1 = sum(float(self._parts[part].f1_score) for part in parts)
        count = self._count(*parts)
        return {"exact_match": 100 * exact / count, "f1": 100 * f1 / count}


def compute_squad(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """The scores of all questions at once."""
    scores = AnswerScores()
    for answer, wanted in zip(predictions, references, strict=True):
        scores.add(answer, wanted)
    return scores.score()
