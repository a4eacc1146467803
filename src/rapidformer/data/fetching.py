"""One micro-batch, fetched, collated and sent: what a worker of the loader does.

torch shares the memory of every tensor that a worker returns, and the receiver has to open it.
That takes several milliseconds per batch, as long as a whole step of a small model. Up to a
megabyte, sending the values is much faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import get_worker_info

from rapidformer.data.batch import describe_batch, fits_numpy
from rapidformer.data.data_source import DataSource
from rapidformer.data.mixture import Sets, StreamSets
from rapidformer.data.random_numbers import random_numbers_from, sample_seeds
from rapidformer.errors import RapidformerError

Collate = Callable[[list[Any]], Any]
Dealt = tuple[int, list[Any], bool, bool]
"""A micro-batch's number and samples, whether it is a filler, and whether it is the last one."""
Fetched = tuple[Any, tuple[int, ...], int, bool, bool, tuple[int, ...]]
"""The batch (or an error), its counts, the rest of what was dealt, and the sets of the rows."""
_LARGE = 2**20
"""Bytes of a batch from which shared memory is faster."""


@dataclass(frozen=True, eq=False)
class Fetcher:
    """Turns a round's key into a collated batch, under random numbers of its own.

    Whatever a data set or a collate function draws depends on the seed, the epoch and the
    micro-batch's place in the global order alone: not on the number of processes or workers, on
    reading ahead, or on where a run resumed.
    """

    source: DataSource
    collate: Collate
    seed: tuple[int, int, int]
    sets: Sets | StreamSets | None = None
    """Given if a batch is to know the sets of its rows."""

    def __getitem__(self, key: Dealt) -> Fetched:
        number, indices, is_filler, is_last = key
        try:
            with random_numbers_from((*self.seed, number)):
                rows = self.source.get_rows(indices)
                run_seed, epoch, _ = self.seed
                # Of a stream, the samples come with their numbers.
                numbers = [index[0] if isinstance(index, tuple) else index for index in indices]
                token = sample_seeds.set([(run_seed, epoch, 1, number) for number in numbers])
                try:
                    batch = self.collate(rows)
                finally:
                    sample_seeds.reset(token)
        except RapidformerError as error:
            # Handed over as it is: raised in a worker, it would come with the worker's traceback.
            return error, (), number, is_filler, is_last, ()
        info = describe_batch(batch)
        counts = tuple(info.as_filler() if is_filler else info)
        sets = () if self.sets is None else tuple(map(self.sets.find, indices))
        return pack(batch), counts, number, is_filler, is_last, sets


class Parcel:
    """A batch whose tensors travel by value."""

    def __init__(self, batch: dict[Any, Any]) -> None:
        self._names = [name for name, value in batch.items() if isinstance(value, torch.Tensor)]
        self._values = {**batch, **{name: batch[name].numpy() for name in self._names}}

    def unpack(self) -> dict[Any, Any]:
        tensors = {name: torch.from_numpy(self._values[name]) for name in self._names}
        return {**self._values, **tensors}

    def pin_memory(self) -> dict[Any, Any]:
        """The batch in pinned memory; torch's loader calls this in a thread of its own."""
        batch = self.unpack()
        return {**batch, **{name: batch[name].pin_memory() for name in self._names}}


def pack(batch: Any) -> Any:
    """Make a parcel of a small batch, if this is a worker process and its tensors are plain."""
    if get_worker_info() is None or type(batch) is not dict:
        return batch
    size = 0
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            if not fits_numpy(value):
                return batch
            size += value.nbytes
        elif isinstance(value, (dict, list, tuple)):
            return batch  # more tensors may be in it
    return Parcel(batch) if size < _LARGE else batch
