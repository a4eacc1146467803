"""Read the same stream of samples on every rank.

Every rank reads the whole stream and keeps its slice of each round, so all of them must draw the
same random numbers for it and get the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from rapidformer.data.digest import compute_digest
from rapidformer.data.random_numbers import random_numbers_from
from rapidformer.errors import DataError

Take = Callable[[int], list[Any]]
"""Reads the next samples, up to this many."""


class StreamReader:
    """Reads passes over a stream, and compares the first rows with those of the other ranks."""

    def __init__(
        self, dataset: Any, seed: int, gather_digests: Callable[[str], Sequence[str]] | None
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._gather_digests = gather_digests
        """How the ranks compare what they have read; None once they have."""

    def start(self, epoch: int) -> Take:
        """Start a pass over the stream."""
        # Not the process's own numbers: all ranks must read the same samples. And one sequence of
        # numbers for the whole pass: where rounds begin must not change what is read.
        numbers = random_numbers_from((self._seed, epoch), is_continued=True)
        with numbers:
            rows = iter(self._dataset)

        def take(count: int) -> list[Any]:
            with numbers:
                samples = list(islice(rows, count))
            self._check_equal(samples)
            return samples

        return take

    def _check_equal(self, samples: list[Any]) -> None:
        """Refuse a stream if the ranks read different rows of it; compares one round only."""
        if self._gather_digests is None:
            return
        digests = self._gather_digests(compute_digest(samples))
        self._gather_digests = None
        if len(set(digests)) > 1:
            raise DataError(
                f"the processes read different rows from {type(self._dataset).__name__}: it shards "
                "itself by rank (datasets.distributed.split_dataset_by_node, RANK, ...), or it "
                "shuffles without a seed. Every process must read the same, whole stream: the "
                "loader deals out the rows itself. Remove the sharding, or give the shuffle a seed."
            )
