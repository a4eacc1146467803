"""How a model is evaluated: during training, and by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


def evaluate_model(engine: RapidformerEngine, run: Callable[[], Metrics]) -> Metrics:
    """Evaluate without gradients and dropout, then restore the mode of each module."""
    with engine.model.evaluating():
        return run()
