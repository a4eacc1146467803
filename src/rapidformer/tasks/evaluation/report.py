"""The result of an evaluation: numbers to read on, a file to keep and tables to look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.strict_json import drop_not_finite, format_json
from rapidformer.tasks.metrics.tally import ReportTable, start_table

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """The metrics of a model on a split; ``print(report)`` shows them as tables."""

    task: str
    split: str
    metrics: dict[str, float]
    examples: int
    seconds: float
    tables: Sequence[ReportTable] = field(default=())
    """Scores by class, entity or language pair, and the confusion matrix, if there are any."""

    def to_json(self) -> dict[str, Any]:
        """Everything, as it is written to a file."""
        result: dict[str, Any] = {"task": self.task, "split": self.split, **self.get_numbers()}
        result |= {table.key: table.to_json() for table in self.tables}
        whole: dict[str, Any] = drop_not_finite(result)
        return whole

    def get_numbers(self) -> dict[str, float]:
        """The metrics, the number of examples and the seconds."""
        return {**self.metrics, "examples": self.examples, "seconds": self.seconds}

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        text = format_json(self.to_json(), indent=1)
        Path(path).expanduser().write_text(text + "\n", encoding="utf-8")

    def show(self, console: Console) -> None:
        """Print the tables."""
        metrics = start_table([""], first="metric")
        for name, value in self.metrics.items():
            metrics.add_row(name, f"{value:.4f}" if math.isfinite(value) else str(value))
        title = f"{self.task} on {self.split}: {self.examples:,} examples"
        parts = [(title, metrics), *((table.title, table.draw()) for table in self.tables)]
        for name, drawn in parts:
            console.print(f"\n{name}", style="bold", markup=False, highlight=False)
            console.print(drawn)
        console.print()

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        self.show(Console(file=text, width=120))
        return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())
