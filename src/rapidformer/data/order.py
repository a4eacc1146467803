"""The order of an epoch's samples: as stored, shuffled, or given by a sampler or by lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rapidformer.data.lengths import GroupedOrder
from rapidformer.data.random_numbers import random_numbers_from

Numbers = Sequence[int] | np.ndarray[Any, Any]


class EpochOrder:
    """Which sample comes at which place; depends only on the seed and the epoch."""

    def __init__(
        self, size: int, seed: int, *, shuffle: bool, draw: Callable[[], Sequence[int]] | None
    ) -> None:
        """``draw`` draws a custom order from torch's random numbers."""
        self._size = size
        self._seed = seed
        self._draw = draw
        self._known: tuple[int, Numbers] | None = None
        """The epoch that was ordered last, and its order."""
        self.is_shuffled = shuffle

    def describe(self) -> str:
        """How the samples are ordered, in words."""
        if isinstance(self._draw, GroupedOrder):
            return "grouped by length"
        if self._draw is not None:
            return "by its own sampler"
        return "shuffled" if self.is_shuffled else "as stored"

    def start(self, epoch: int) -> Numbers:
        """The numbers of all samples, in the order of this epoch."""
        self._known = epoch, self._compute(epoch)
        return self._known[1]

    def list_numbers(self, epoch: int, positions: range) -> list[int]:
        """The numbers of the samples at these places of an epoch."""
        known, numbers = self._known or (None, [])
        numbers = numbers if known == epoch else self._compute(epoch)
        return [int(number) for number in numbers[positions.start : positions.stop]]

    @property
    def grouped_for(self) -> int | None:
        """The batch size that samples are grouped for; None if they are not."""
        return self._draw.batch_size if isinstance(self._draw, GroupedOrder) else None

    @grouped_for.setter
    def grouped_for(self, batch_size: int | None) -> None:
        if isinstance(self._draw, GroupedOrder) and batch_size is not None:
            self._draw.batch_size = batch_size

    def _compute(self, epoch: int) -> Numbers:
        if self._draw is not None:
            with random_numbers_from((self._seed, epoch)):
                return self._draw()
        if not self.is_shuffled:
            return range(self._size)
        return np.random.default_rng((self._seed, epoch)).permutation(self._size)
