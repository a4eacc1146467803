"""Accuracy, F1 and Matthews correlation by a confusion matrix; correlations and errors; entities.

The rules for entities (boundaries and type must be right) are those of CoNLL's script and seqeval's
default mode: an I- after O begins an entity; IOB1, IOB2 and IOBES all work. seqeval itself needs
scikit-learn and all sentences in memory.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rapidformer.tasks.metrics.tally import (
    ConfusionTable,
    Record,
    ReportTable,
    ScoreTable,
    Tally,
    average_scores,
    score_counts,
)

if TYPE_CHECKING:
    import torch

# What the authors of each GLUE task report; accuracy for every other dataset.
GLUE_METRICS: dict[str, tuple[str, ...]] = {
    "cola": ("matthews_correlation", "accuracy"),
    **dict.fromkeys(("mrpc", "qqp"), ("accuracy", "f1")),
    **dict.fromkeys(("sst2", "mnli", "mnli_matched", "mnli_mismatched"), ("accuracy",)),
    **dict.fromkeys(("qnli", "rte", "wnli"), ("accuracy",)),
}
DEFAULT_METRICS = ("accuracy", "f1")


class ClassTally(Tally):
    """One label per row. F1 is that of class 1 for two classes, otherwise the mean over classes."""

    def __init__(self, names: Sequence[str], metrics: Sequence[str] = DEFAULT_METRICS) -> None:
        from torchmetrics.classification import MulticlassConfusionMatrix

        super().__init__()
        self._names, self._metrics = list(names), metrics
        self._has_positive = len(names) == 2
        self._matrix = MulticlassConfusionMatrix(max(2, len(names)), validate_args=False)

    def add(self, records: Sequence[Record]) -> None:
        guesses = [int(record["logits"].argmax()) for record in records]
        self.add_labels(guesses, [record["label"] for record in records])

    def add_labels(self, guesses: Sequence[int], labels: Sequence[int]) -> None:
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
        return [
            ScoreTable("classes", "by class", rows, average_scores(rows.values())),
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

    def score(self) -> dict[str, float]:
        _, averages = self._score_labels()
        rows = int(self._matrix.confmat[0].sum())
        return {
            "accuracy": self._hits / rows if rows else 0.0,
            "f1": averages["micro avg"]["f1"],
            "f1_macro": averages["macro avg"]["f1"],
        }

    def tables(self) -> list[ReportTable]:
        return [ScoreTable("classes", "by label", *self._score_labels())]

    def _score_labels(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """The scores of each label, and their averages."""
        counts = self._matrix.confmat
        rows = [
            score_counts(right, right + wrong, right + missed)
            for (_, wrong), (missed, right) in [*counts.tolist(), counts.sum(dim=0).tolist()]
        ]
        averages = {"micro avg": rows.pop(), **average_scores(rows)}
        return dict(zip(self._names, rows, strict=True)), averages


def compute_single_label(
    predictions: Sequence[int], labels: Sequence[int], num_labels: int, metrics: Sequence[str]
) -> dict[str, float]:
    """The named metrics of predicted and true classes."""
    tally = ClassTally([str(index) for index in range(num_labels)], metrics)
    tally.add_labels(predictions, labels)
    return tally.score()


def _correlate(counts: torch.Tensor) -> float:
    """Matthews correlation; 0 if all predictions or all labels are one class."""
    total, right = float(counts.sum()), float(counts.trace())
    guessed, wanted = counts.sum(dim=0), counts.sum(dim=1)
    spread = (total**2 - float(guessed @ guessed)) * (total**2 - float(wanted @ wanted))
    return (right * total - float(guessed @ wanted)) / math.sqrt(spread) if spread > 0 else 0.0


class RegressionTally(Tally):
    """Correlations and errors of predicted numbers; 0 with a constant. Ranks need all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._predicted, self._wanted = array("d"), array("d")

    def add(self, records: Sequence[Record]) -> None:
        predicted = [float(record["logits"][0]) for record in records]
        self.add_numbers(predicted, [float(record["label"]) for record in records])

    def add_numbers(self, predicted: Sequence[float], wanted: Sequence[float]) -> None:
        self._predicted.extend(predicted)
        self._wanted.extend(wanted)

    def score(self) -> dict[str, float]:
        import torch

        predicted = torch.as_tensor(self._predicted, dtype=torch.float64)
        wanted = torch.as_tensor(self._wanted, dtype=torch.float64)
        varies = bool(predicted.ne(predicted[0]).any() and wanted.ne(wanted[0]).any())
        pearson, spearman = (
            float(torch.corrcoef(torch.stack(pair))[0, 1].nan_to_num(0.0)) if varies else 0.0
            for pair in ((predicted, wanted), (_rank(predicted), _rank(wanted)))
        )
        errors = predicted - wanted
        return {
            "pearson": pearson, "spearmanr": spearman, "mse": float(errors.square().mean()),
            "mae": float(errors.abs().mean()),
        }  # fmt: skip


def compute_regression(predictions: Sequence[float], labels: Sequence[float]) -> dict[str, float]:
    """The correlations and errors of all rows at once."""
    tally = RegressionTally()
    tally.add_numbers([float(value) for value in predictions], [float(value) for value in labels])
    return tally.score()


def _rank(values: torch.Tensor) -> torch.Tensor:
    """The rank of each value; equal values share the mean of their ranks."""
    import torch

    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: torch.Tensor = counts.cumsum(0) - (counts.double() - 1) / 2
    return ranks[place]


Entity = tuple[str, int, int]

_BEGINS = frozenset("BS")
_ENDS = frozenset("ES")


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """(type, first, last) of every entity in one sentence."""
    entities: list[Entity] = []
    start, last_mark, last_kind = 0, "O", ""
    for position, tag in enumerate([*tags, "O"]):
        mark, kind = _split(tag)
        has_changed = kind != last_kind
        if last_mark != "O" and (
            last_mark in _ENDS or mark in _BEGINS or mark == "O" or has_changed
        ):
            entities.append((last_kind, start, position - 1))
        if mark != "O" and (
            mark in _BEGINS or last_mark == "O" or last_mark in _ENDS or has_changed
        ):
            start = position
        last_mark, last_kind = mark, kind
    return entities


def _split(tag: str) -> tuple[str, str]:
    return (tag[:1] or "O"), (tag[1:].split("-", maxsplit=1)[-1] or "_")


def has_entity_tags(names: Iterable[str]) -> bool:
    """Whether tags mark entity boundaries (B-PER, I-PER, O), unlike part-of-speech tags."""
    return all(name == "O" or name[:2] in {"B-", "I-", "E-", "S-", "L-", "U-"} for name in names)


class EntityTally(Tally):
    """Counts of entities by type, and of tags; records number a sentence's tags among ``names``."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        super().__init__()
        self._names = list(names)
        self._right: Counter[str] = Counter()
        self._guessed: Counter[str] = Counter()
        self._wanted: Counter[str] = Counter()
        self._hits = self._tags = 0

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            self.add_tags(
                [self._names[tag] for tag in record["guesses"]],
                [self._names[tag] for tag in record["labels"]],
            )

    def add_tags(self, predicted: Sequence[str], expected: Sequence[str]) -> None:
        guesses, truths = set(find_entities(predicted)), set(find_entities(expected))
        self._right.update(kind for kind, _, _ in guesses & truths)
        self._guessed.update(kind for kind, _, _ in guesses)
        self._wanted.update(kind for kind, _, _ in truths)
        self._hits += sum(p == e for p, e in zip(predicted, expected, strict=True))
        self._tags += len(expected)

    def score(self) -> dict[str, float]:
        """Precision, recall and F1 of entities, and the accuracy of tags."""
        scores = self._score_all()
        del scores["support"]
        return {**scores, "accuracy": self._hits / self._tags if self._tags else 0.0}

    def score_types(self) -> dict[str, dict[str, float]]:
        """Precision, recall, F1 and support of every type of entity."""
        return {
            kind: score_counts(self._right[kind], self._guessed[kind], self._wanted[kind])
            for kind in sorted(self._guessed.keys() | self._wanted.keys())
        }

    def tables(self) -> list[ReportTable]:
        """The scores of each type of entity, as seqeval reports them."""
        rows = self.score_types()
        averages = {"micro avg": self._score_all(), **average_scores(rows.values())}
        return [ScoreTable("entities", "by entity", rows, averages)]

    def _score_all(self) -> dict[str, float]:
        return score_counts(self._right.total(), self._guessed.total(), self._wanted.total())


class TagTally(ClassTally):
    """Each tag counts by itself; even of two tags, neither is "the" positive one."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._has_positive = False

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            self.add_labels(record["guesses"], record["labels"])
