"""Metrics and tables computed while an evaluation runs: counts and sums, never records."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Record = Mapping[str, Any]
# A larger matrix does not fit on a screen: its most frequent mistakes are listed instead.
_SHOWN_CLASSES = 12
_SHOWN_MISTAKES = 20


@dataclass(frozen=True)
class ScoreTable:
    """Scores by class, entity type or language pair; ``averages`` are over the rows."""

    key: str
    """Its name in the JSON file."""
    title: str
    rows: Mapping[str, Mapping[str, float]]
    averages: Mapping[str, Mapping[str, float]]

    def to_json(self) -> dict[str, dict[str, float]]:
        return {name: dict(scores) for name, scores in {**self.rows, **self.averages}.items()}

    def draw(self) -> Table:
        from rich.markup import escape

        columns = list(dict.fromkeys(name for row in self.rows.values() for name in row))
        table = start_table(columns)
        for part in (self.rows, self.averages):
            for name, scores in part.items():
                table.add_row(escape(name), *(_show(scores.get(column)) for column in columns))
            table.add_section()
        return table


@dataclass(frozen=True, kw_only=True)
class ConfusionTable:
    """How often each true class was predicted as each class."""

    names: Sequence[str]
    counts: Sequence[Sequence[int]]
    """By true class, then by predicted class."""
    key: str = "confusion_matrix"

    @property
    def title(self) -> str:
        if len(self.names) > _SHOWN_CLASSES:
            return "most frequent mistakes"
        return "confusion matrix (rows: true, columns: predicted)"

    def to_json(self) -> dict[str, Any]:
        return {"labels": list(self.names), "counts": [list(row) for row in self.counts]}

    def draw(self) -> Table:
        from rich.markup import escape

        if len(self.names) > _SHOWN_CLASSES:
            return self._draw_mistakes()
        table = start_table(self.names)
        for true, (name, row) in enumerate(zip(self.names, self.counts, strict=True)):
            cells = [
                f"[bold]{count:,}[/bold]" if guess == true else f"{count:,}"
                for guess, count in enumerate(row)
            ]
            table.add_row(escape(name), *cells)
        return table

    def _draw_mistakes(self) -> Table:
        from rich.markup import escape

        rows = [
            (count, true, guess)
            for true, row in enumerate(self.counts)
            for guess, count in enumerate(row)
            if true != guess and count
        ]
        rows.sort(key=lambda mistake: -mistake[0])
        table = start_table(["predicted", "count"], first="true")
        for count, true, guess in rows[:_SHOWN_MISTAKES]:
            table.add_row(escape(self.names[true]), escape(self.names[guess]), f"{count:,}")
        return table


ReportTable = ScoreTable | ConfusionTable


def score_counts(right: float, guessed: float, wanted: float) -> dict[str, float]:
    """Precision, recall and F1 from counts; 0 where they are undefined, as in scikit-learn."""
    return {
        "precision": right / guessed if guessed else 0.0,
        "recall": right / wanted if wanted else 0.0,
        "f1": 2 * right / (guessed + wanted) if guessed + wanted else 0.0,
        "support": int(wanted),
    }


def average_scores(rows: Iterable[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The plain mean over classes, and the mean weighted by their support."""
    scores = list(rows)
    support = int(sum(row["support"] for row in scores))
    means: dict[str, dict[str, float]] = {"macro avg": {}, "weighted avg": {}}
    for name in ("precision", "recall", "f1"):
        values = [row[name] for row in scores]
        means["macro avg"][name] = sum(values) / len(values) if values else 0.0
        weighted = sum(row[name] * row["support"] for row in scores)
        means["weighted avg"][name] = weighted / support if support else 0.0
    return {name: {**mean, "support": support} for name, mean in means.items()}


def start_table(columns: Sequence[str], first: str = "") -> Table:
    """An empty table: names on the left, numbers on the right."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(escape(column), justify="right")
    return table


def _show(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


class Tally(ABC):
    """The running metrics of one split."""

    def __init__(self) -> None:
        self._loss = 0.0
        self.terms = 0
        """What the loss is a mean over."""
        self.examples = 0
        """How many of the user's examples were scored so far."""

    def update(self, records: Sequence[Record]) -> None:
        """Add records: each has its summed ``loss`` and the ``count`` of its terms."""
        for record in records:
            self._loss += record["loss"]
            self.terms += record["count"]
        self.add(records)
        self.examples += len(records)

    @abstractmethod
    def add(self, records: Sequence[Record]) -> None:
        """Add what the task's own metrics need; each record is an example."""

    @abstractmethod
    def score(self) -> dict[str, float]:
        """The task's metrics, in addition to the loss."""

    def tables(self) -> list[ReportTable]:
        """Details by class, entity or language pair, if the task has any."""
        return []

    def get_mean_loss(self) -> float:
        """The exact mean over the split: sums over counts, not a mean of means."""
        return self._loss / self.terms if self.terms else float("nan")

    def compute(self) -> dict[str, float]:
        """All metrics of what was added so far."""
        return {"loss": self.get_mean_loss(), **self.score()}


class MeanTally(Tally):
    """The means of what records show: ``shown`` are numbers of examples, ``by_token`` sums over
    tokens with their counts, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            shown = {name: (value, 1) for name, value in record.get("shown", {}).items()}
            for name, (value, count) in {**shown, **record.get("by_token", {})}.items():
                self._sums[name] += value
                self._counts[name] += count

    def score(self) -> dict[str, float]:
        return {name: total / max(self._counts[name], 1) for name, total in self._sums.items()}


class TokenTally(MeanTally):
    """Also the perplexity: of the labels, if the loss has other parts."""

    def score(self) -> dict[str, float]:
        means = super().score()
        loss = means.get("label_loss", self.get_mean_loss())
        return {"perplexity": compute_perplexity(loss), **means}


class ChoiceTally(Tally):
    """The fraction of rows whose highest score is the right one's."""

    _hits = 0

    def add(self, records: Sequence[Record]) -> None:
        self._hits += sum(int(record["logits"].argmax()) == record["label"] for record in records)

    def score(self) -> dict[str, float]:
        return {"accuracy": self._hits / self.examples if self.examples else 0.0}


def compute_perplexity(mean_loss: float) -> float:
    """exp of the mean loss per token; infinity if that overflows."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf
