"""How a model is evaluated, and how far its evaluations have come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rapidformer.engine import RapidformerEngine

Metrics = dict[str, float]


@dataclass(kw_only=True)
class Evaluation:
    """How a model is evaluated during training, and which result is better."""

    run: Callable[[], Metrics]
    interval: int | None = None
    """Updates between evaluations if the settings do not say; None: after each epoch."""
    best_metric: str | None = None
    greater_is_better: bool = True


@dataclass
class Progress:
    """The progress of a run, beyond what the engine counts; part of every checkpoint."""

    best_metric: str | None = None
    best_value: float | None = None
    best_step: int | None = None
    evaluations: Metrics = field(default_factory=dict)
    evaluated_at: int | None = None
    evaluations_since_best: int = 0
    """In a row, none better by ``--early-stopping-threshold``."""

    def get_best(self) -> tuple[str, float, int] | None:
        """The metric, its value and the step of the best model so far."""
        if self.best_value is None or self.best_step is None:
            return None
        return self.best_metric or "metric", self.best_value, self.best_step


def evaluate_model(engine: RapidformerEngine, run: Callable[[], Metrics]) -> Metrics:
    """Evaluate without gradients and dropout, then restore the mode of each module."""
    with engine.model.evaluating():
        return run()
