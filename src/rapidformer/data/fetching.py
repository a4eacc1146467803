"""One micro-batch, fetched and collated: what a worker of the loader does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rapidformer.data.batch import describe_batch
from rapidformer.data.data_source import DataSource
from rapidformer.data.parcel import pack
from rapidformer.data.random_numbers import random_numbers_from, sample_seeds
from rapidformer.errors import RapidformerError

Collate = Callable[[list[Any]], Any]
Dealt = tuple[int, list[Any], bool, bool]
"""A micro-batch's number and samples, whether it is a filler, and whether it is the last one."""
Fetched = tuple[Any, tuple[int, ...], int, bool, bool]
"""The batch (or an error), its counts, and the rest of what was dealt."""


class Fetcher:
    """Turns a round's key into a collated batch, under random numbers of its own.

    Whatever a data set or a collate function draws depends on the seed, the epoch and the
    micro-batch's place in the global order alone: not on the number of processes or workers, on
    reading ahead, or on where a run resumed.
    """

    def __init__(self, source: DataSource, collate: Collate, seed: tuple[int, int, int]) -> None:
        self._source = source
        self._collate = collate
        self._seed = seed

    def __getitem__(self, key: Dealt) -> Fetched:
        number, indices, is_filler, is_last = key
        try:
            with random_numbers_from((*self._seed, number)):
                batch = self._collate_seeded(self._source.get_rows(indices), indices)
        except RapidformerError as error:
            # Handed over as it is: raised in a worker, it would come with the worker's traceback.
            return error, (), number, is_filler, is_last
        info = describe_batch(batch)
        counts = tuple(info.as_filler() if is_filler else info)
        return pack(batch), counts, number, is_filler, is_last

    def _collate_seeded(self, rows: list[Any], indices: list[Any]) -> Any:
        run_seed, epoch, _ = self._seed
        token = sample_seeds.set([(run_seed, epoch, 1, index) for index in indices])
        try:
            return self._collate(rows)
        finally:
            sample_seeds.reset(token)
