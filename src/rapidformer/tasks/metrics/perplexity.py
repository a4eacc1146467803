"""How surprised a language model is, per token."""

from __future__ import annotations

import math


def compute_perplexity(mean_loss: float) -> float:
    """exp of the mean loss per token; a loss too large for that is told as infinity."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf
