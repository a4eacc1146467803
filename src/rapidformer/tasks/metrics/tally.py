"""Metrics that are computed while an evaluation runs.

A tally takes the records of a split in the order of the data, a few at a time, and keeps counts and
sums of them, never the records: its size does not grow with the split.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rapidformer.tasks.metrics.tables import ReportTable

Record = Mapping[str, Any]


class Tally(ABC):
    """The running metrics of one split."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._terms = 0
        self.examples = 0
        """How many of the user's examples were scored so far."""

    def update(self, records: Sequence[Record]) -> None:
        """Add records: each has its summed ``loss`` and the ``count`` of its terms."""
        for record in records:
            self._loss += record["loss"]
            self._terms += record["count"]
        self.add(records)

    @abstractmethod
    def add(self, records: Sequence[Record]) -> None:
        """Add what the task's own metrics need, and count the examples."""

    @abstractmethod
    def score(self) -> dict[str, float]:
        """The task's metrics, in addition to the loss."""

    def tables(self) -> list[ReportTable]:
        """Details by class, entity or language pair, if the task has any."""
        return []

    def get_mean_loss(self) -> float:
        """The exact mean over the split: sums over counts, not a mean of means."""
        return self._loss / self._terms if self._terms else float("nan")

    def compute(self) -> dict[str, float]:
        """All metrics of what was added so far."""
        return {"loss": self.get_mean_loss(), **self.score()}


class TokenTally(Tally):
    """Perplexity, and the fraction of the labelled tokens that were predicted."""

    def __init__(self) -> None:
        super().__init__()
        self._hits = 0

    def add(self, records: Sequence[Record]) -> None:
        self._hits += sum(record["hits"] for record in records)
        self.examples += len(records)

    def score(self) -> dict[str, float]:
        return {
            "perplexity": compute_perplexity(self.get_mean_loss()),
            "accuracy": self._hits / self._terms if self._terms else 0.0,
        }


class ChoiceTally(Tally):
    """The fraction of rows whose highest score is the right one's."""

    def __init__(self) -> None:
        super().__init__()
        self._hits = 0

    def add(self, records: Sequence[Record]) -> None:
        self._hits += sum(int(record["logits"].argmax()) == record["label"] for record in records)
        self.examples += len(records)

    def score(self) -> dict[str, float]:
        return {"accuracy": self._hits / self.examples if self.examples else 0.0}


def compute_perplexity(mean_loss: float) -> float:
    """exp of the mean loss per token; infinity if that overflows."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf
