"""Perplexity per token."""

from __future__ import annotations

import math


def compute_perplexity(mean_loss: float) -> float:
    """exp of the mean loss per token; infinity if that overflows."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf
