"""What the loader needs of data: rows by their number, or a stream of rows with a position.

A row has one global number, the same on every rank and after every resume, and what a source gives
depends on that number alone. So a mixture of data sets is a source as well: it finds the set and
the row in it from the number. Of a stream, every rank reads all rows and keeps its slice of each
round: all ranks must draw the same random numbers for it and get the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import IterableDataset

from rapidformer.data.random_numbers import random_numbers_from
from rapidformer.errors import DataError

Take = Callable[[int], list[Any]]
"""Reads the next samples, up to this many."""


@runtime_checkable
class DataSource(Protocol):
    """Data as the loader sees it; a user's data set may be one itself."""

    name: str
    fingerprint: str | None
    """Another one for other rows; None if that is not known. Compared when a run is resumed."""

    @property
    def size(self) -> int | None:
        """The number of rows; None for a stream."""

    def get_rows(self, numbers: Sequence[int]) -> list[Any]:
        """The rows with these numbers; not for a stream."""

    def read(self, seed: int, epoch: int, position: int) -> Take:
        """Read a pass over a stream, from after this many rows on."""

    def find_set(self, number: int) -> str:
        """The name of the data set that a row is from."""


class Rows:
    """A data set with a length, whose rows can be had in any order."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.name = type(dataset).__name__
        self.fingerprint: str | None = getattr(dataset, "fingerprint", None)
        self.size: int | None = len(dataset)

    def check_size(self) -> None:
        """Refuse a data set that has become longer or shorter: a run is planned by its length."""
        if len(self._dataset) != self.size:
            raise DataError(
                f"{self.name} has {len(self._dataset)} rows now, and had {self.size} when its "
                "loader was made, which would still give out those. Give a new DataLoader over it "
                "to engine.data.adopt_loader(loader, is_training=True), or to "
                "accelerator.prepare(loader), or read the rows as a stream (IterableDataset)."
            )

    def get_rows(self, numbers: Sequence[int]) -> list[Any]:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        return list(fetch_many(numbers)) if fetch_many else [self._dataset[n] for n in numbers]

    def read(self, seed: int, epoch: int, position: int) -> Take:
        raise TypeError(f"{self.name} is not a stream")

    def find_set(self, number: int) -> str:
        if (sets := getattr(self._dataset, "sets", None)) is not None:
            return sets.names[sets.find(number)]
        find: Callable[[int], str] | None = getattr(self._dataset, "find_set", None)
        return self.name if find is None else find(number)


class Stream:
    """A data set that can only be read from its start to its end.

    The rows before a position are read again and dropped, although the data set may have a
    ``state_dict`` of its own: Hugging Face's leaves out the rows in its shuffle buffer.
    """

    size: int | None = None
    fingerprint: str | None = None

    def __init__(
        self, dataset: Any, gather_digests: Callable[[str], Sequence[str]] | None = None
    ) -> None:
        self._dataset = dataset
        self.name = type(dataset).__name__
        self._gather_digests = gather_digests
        """How the ranks compare what they have read; None once they have."""

    def get_rows(self, numbers: Sequence[int]) -> list[Any]:
        raise TypeError(f"{self.name} is a stream")

    def find_set(self, number: int) -> str:
        return self.name

    def read(self, seed: int, epoch: int, position: int) -> Take:
        # Not the process's own numbers: all ranks must read the same samples. And one sequence of
        # numbers for the whole pass: where rounds begin must not change what is read.
        numbers = random_numbers_from((seed, epoch), is_continued=True)
        with numbers:
            rows = iter(self._dataset)

        def take(count: int) -> list[Any]:
            with numbers:
                samples = list(islice(rows, count))
            self._check_equal(samples)
            return samples

        with numbers:
            for _ in islice(rows, position):
                pass
        return take

    def _check_equal(self, samples: list[Any]) -> None:
        """Refuse a stream if the ranks read different rows of it; compares one round only."""
        if self._gather_digests is None:
            return
        digest = hashlib.sha256()
        add_to_digest(digest, samples)
        digests = self._gather_digests(digest.hexdigest())
        self._gather_digests = None
        if len(set(digests)) > 1:
            raise DataError(
                f"the processes read different rows from {self.name}: it shards "
                "itself by rank (datasets.distributed.split_dataset_by_node, RANK, ...), or it "
                "shuffles without a seed. Every process must read the same, whole stream: the "
                "loader deals out the rows itself. Remove the sharding, or give the shuffle a seed."
            )


def open_source(
    dataset: Any, gather_digests: Callable[[str], Sequence[str]] | None = None
) -> DataSource:
    """Whatever the user has as a source."""
    if isinstance(dataset, DataSource):
        return dataset
    if is_stream(dataset):
        return Stream(dataset, gather_digests)
    return Rows(dataset)


def find_length(dataset: Any) -> int | None:
    """The number of its rows; a stream may say that it has none by a TypeError."""
    try:
        return len(dataset)
    except TypeError:
        return None


def is_stream(dataset: Any) -> bool:
    """Whether the data has no length, or must be read in order."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")


def add_to_digest(digest: Any, value: Any) -> None:
    """Add rows to a digest: equal for equal rows, in whatever process."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            add_to_digest(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)}:".encode())
        for item in value:
            add_to_digest(digest, item)
    elif hasattr(value, "tobytes"):  # arrays and images
        digest.update(value.tobytes())
    elif isinstance(value, (str, bytes, int, float, bool, type(None))):
        digest.update(repr(value).encode())
    else:
        # Its repr may hold an address, which differs between processes.
        digest.update(type(value).__name__.encode())
