"""Mixtures of data sets: which set a sample is from depends on its global number alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_BLOCK = 1024


def choose_sets(
    weights: Sequence[float], seed: int, start: int, count: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers of the sets that the samples ``start`` to ``start + count`` are from."""
    shares = np.asarray(weights, dtype=np.float64) / sum(weights)
    first, last = start // _BLOCK, (start + count - 1) // _BLOCK
    blocks = [
        np.random.default_rng((seed, block)).choice(len(shares), _BLOCK, p=shares)
        for block in range(first, last + 1)
    ]
    skipped = start - first * _BLOCK
    return np.concatenate([*blocks, np.empty(0, np.int64)])[skipped : skipped + count]
