"""The progress of a run, beyond what the engine counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """The progress of a run, beyond what the engine counts; part of every checkpoint."""

    best_metric: str | None = None
    best_value: float | None = None
    best_step: int | None = None
    evaluations: dict[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    evaluations_since_best: int = 0
    """In a row, none better by ``--early-stopping-threshold``."""

    def get_best(self) -> tuple[str, float, int] | None:
        """The metric, its value and the step of the best model so far."""
        if self.best_value is None or self.best_step is None:
            return None
        return self.best_metric or "metric", self.best_value, self.best_step
