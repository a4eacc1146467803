"""Accuracy, F1 and Matthews correlation, for one or several labels per row.

All of them follow from the confusion matrix, which torchmetrics counts batch by batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rapidformer.tasks.metrics.tables import (
    ConfusionTable,
    ReportTable,
    ScoreTable,
    average_scores,
    score_counts,
)
from rapidformer.tasks.metrics.tally import Record, Tally

if TYPE_CHECKING:
    import torch

# What the authors of each GLUE task report; accuracy for every other dataset.
GLUE_METRICS: dict[str, tuple[str, ...]] = {
    "cola": ("matthews_correlation", "accuracy"),
    "mrpc": ("accuracy", "f1"),
    "qqp": ("accuracy", "f1"),
    "sst2": ("accuracy",),
    "mnli": ("accuracy",),
    "mnli_matched": ("accuracy",),
    "mnli_mismatched": ("accuracy",),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
}
DEFAULT_METRICS = ("accuracy", "f1")


class ClassTally(Tally):
    """One label per row. F1 is that of class 1 for two classes, otherwise the mean over classes."""

    def __init__(
        self,
        names: Sequence[str],
        metrics: Sequence[str] = DEFAULT_METRICS,
        *,
        has_positive_class: bool | None = None,
    ) -> None:
        from torchmetrics.classification import MulticlassConfusionMatrix

        super().__init__()
        self._names, self._metrics = list(names), metrics
        self._has_positive = len(names) == 2 if has_positive_class is None else has_positive_class
        self._matrix = MulticlassConfusionMatrix(max(2, len(names)), validate_args=False)

    def add(self, records: Sequence[Record]) -> None:
        guesses = [int(record["logits"].argmax()) for record in records]
        self.add_labels(guesses, [record["label"] for record in records])
        self.examples += len(records)

    def add_labels(self, guesses: Sequence[int], labels: Sequence[int]) -> None:
        """Add predicted and true classes."""
        import torch

        if len(labels):
            self._matrix.update(torch.as_tensor(guesses), torch.as_tensor(labels))

    def score(self) -> dict[str, float]:
        counts = self._matrix.confmat.double()
        compute = {
            "accuracy": lambda: float(counts.trace() / counts.sum()),
            "f1": self._compute_f1,
            "matthews_correlation": lambda: _correlate(counts),
        }
        return {name: compute[name]() for name in self._metrics}

    def tables(self) -> list[ReportTable]:
        rows = self._score_classes()
        averages = average_scores(rows.values())
        return [
            ScoreTable(key="classes", title="by class", rows=rows, averages=averages),
            ConfusionTable(names=self._names, counts=self._matrix.confmat.tolist()),
        ]

    def _score_classes(self) -> dict[str, dict[str, float]]:
        """Precision, recall, F1 and support of every class that was true or predicted."""
        counts = self._matrix.confmat
        right, guessed, wanted = counts.diag(), counts.sum(dim=0), counts.sum(dim=1)
        triples = zip(right.tolist(), guessed.tolist(), wanted.tolist(), strict=True)
        return {
            name: score_counts(*triple)
            for name, triple in zip(self._names, triples, strict=False)
            if triple[1] or triple[2]
        }

    def _compute_f1(self) -> float:
        rows = self._score_classes()
        if self._has_positive:
            return rows[self._names[1]]["f1"] if self._names[1] in rows else 0.0
        return average_scores(rows.values())["macro avg"]["f1"]


class MultiLabelTally(Tally):
    """Several labels per row; accuracy counts the rows in which every label is right."""

    def __init__(self, names: Sequence[str]) -> None:
        from torchmetrics.classification import MultilabelConfusionMatrix

        super().__init__()
        self._names = list(names)
        self._matrix = MultilabelConfusionMatrix(len(names), validate_args=False)
        self._hits = 0

    def add(self, records: Sequence[Record]) -> None:
        self.add_labels(
            [(record["logits"] > 0).astype(int).tolist() for record in records],
            [[int(value >= 0.5) for value in record["label"]] for record in records],
        )

    def add_labels(self, guesses: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> None:
        """Add rows of 0 and 1, one number per label."""
        import torch

        predicted, wanted = torch.as_tensor(guesses), torch.as_tensor(labels)
        self._matrix.update(predicted, wanted)
        self._hits += int((predicted == wanted).all(dim=1).sum())
        self.examples += len(labels)

    def score(self) -> dict[str, float]:
        rows = self._score_labels()
        return {
            "accuracy": self._hits / self.examples if self.examples else 0.0,
            "f1": self._average_all()["f1"],
            "f1_macro": average_scores(rows.values())["macro avg"]["f1"],
        }

    def tables(self) -> list[ReportTable]:
        rows = self._score_labels()
        averages = {"micro avg": self._average_all(), **average_scores(rows.values())}
        return [ScoreTable(key="classes", title="by label", rows=rows, averages=averages)]

    def _score_labels(self) -> dict[str, dict[str, float]]:
        counts = self._matrix.confmat.tolist()
        return {
            name: score_counts(right, right + wrong, right + missed)
            for name, ((_, wrong), (missed, right)) in zip(self._names, counts, strict=True)
        }

    def _average_all(self) -> dict[str, float]:
        (_, wrong), (missed, right) = self._matrix.confmat.sum(dim=0).tolist()
        return score_counts(right, right + wrong, right + missed)


def compute_single_label(
    predictions: Sequence[int],
    labels: Sequence[int],
    num_labels: int,
    metrics: Sequence[str] = DEFAULT_METRICS,
) -> dict[str, float]:
    """The named metrics of predicted and true classes."""
    tally = ClassTally([str(index) for index in range(num_labels)], metrics)
    tally.add_labels(predictions, labels)
    return tally.score()


def compute_multi_label(
    predictions: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Micro and macro F1, and the fraction of rows in which every label is right."""
    tally = MultiLabelTally([str(index) for index in range(len(labels[0]))])
    tally.add_labels(predictions, labels)
    return tally.score()


def _correlate(counts: torch.Tensor) -> float:
    """Matthews correlation; 0 if all predictions or all labels are one class."""
    total, right = float(counts.sum()), float(counts.trace())
    guessed, wanted = counts.sum(dim=0), counts.sum(dim=1)
    spread = (total**2 - float(guessed @ guessed)) * (total**2 - float(wanted @ wanted))
    return (right * total - float(guessed @ wanted)) / math.sqrt(spread) if spread > 0 else 0.0
