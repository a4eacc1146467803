"""A user's DataLoader as one that divides its data over the ranks."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from rapidformer.data.data_source import is_stream
from rapidformer.data.fetching import Collate
from rapidformer.data.loader import DistributedLoader
from rapidformer.errors import DataError
from rapidformer.log import warn_once


def get_rows_per_batch(loader: DataLoader[Any]) -> int | None:
    """Rows of a batch, if torch's own batch sampler makes the batches."""
    batches = loader.batch_sampler
    return batches.batch_size if type(batches) is BatchSampler else None


def adopt_loader(
    loader: DataLoader[object], *, batch_size: int | None = None, **share: Any
) -> DistributedLoader:
    """A user's DataLoader: the same data in the same batches, or others, divided over the ranks.

    Data set, collate function, batch size, workers and order carry over. A sampler of the user's
    own decides the order (it must give the same one on every process). What a batch sampler of the
    user's own makes is not cut: each process gets every n-th batch. ``share`` is what a
    ``DistributedLoader`` must know of this process.
    """
    batches: Any = loader.batch_sampler
    common = {**share, "num_workers": loader.num_workers}
    if type(batches) is not BatchSampler:
        return _adopt_batches(loader, common)
    sampler: Any = None if is_stream(loader.dataset) else batches.sampler
    given = sampler
    if isinstance(sampler, DistributedSampler):
        sampler = _Undivided(sampler)
    is_random = (
        type(sampler) is RandomSampler  # one derived from it may give any order
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if is_random and sampler.generator is not None:
        warn_once(
            "shuffled data comes in an order that follows --seed (or --data-seed), not the "
            "DataLoader's generator: then a resumed run goes on in it. For an order of your own, "
            "give the DataLoader a sampler of your own."
        )
    if is_random or type(sampler) is SequentialSampler:
        sampler = None
    adopted = DistributedLoader(
        loader.dataset, collate=loader.collate_fn, shuffle=is_random,
        # Of a batch, as it says, also if several make an update.
        drop_last=batches.drop_last, keeps_rounds=True,
        micro_batch_size=batch_size or batches.batch_size,
        order=None if sampler is None else _OwnOrder(sampler, share.get("gather_digests")).draw,
        num_samples=len(sampler) if isinstance(sampler, Sized) else None, **common,
    )  # fmt: skip
    adopted.sampler = given
    return adopted


def _adopt_batches(loader: DataLoader[object], common: dict[str, Any]) -> DistributedLoader:
    """A DataLoader whose batches the user's own code makes: each of them counts as one sample."""
    sampler: Any = loader.batch_sampler or loader.sampler
    dataset: Any = loader.dataset
    draw = None
    if not is_stream(dataset):
        if not isinstance(sampler, Sized):
            raise DataError(
                f"the DataLoader's {type(sampler).__name__} has no length: give it a __len__() "
                "that says how many batches an epoch has."
            )
        if isinstance(getattr(sampler, "sampler", sampler), DistributedSampler):
            raise DataError(
                "the DataLoader's batches are made from a DistributedSampler, but the engine "
                "spreads them itself: make them from the whole data."
            )
        takes_rows, compare = loader.batch_sampler is not None, common.get("gather_digests")
        dataset = _Batches(dataset, sampler, compare, takes_rows=takes_rows)
        draw = dataset.draw
    adopted = _BatchLoader(
        dataset,
        collate=partial(_collate_one, loader.collate_fn),
        micro_batch_size=1,
        order=draw,
        **common,
    )
    adopted.sampler = sampler
    adopted.batch_size = getattr(sampler, "batch_size", None) or 1
    return adopted


class _Undivided(Sampler[int]):
    """What a ``DistributedSampler`` orders, for all processes together: the loader divides it.

    The rows that it repeats so that all processes get equally many are left out.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        if type(sampler).__iter__ is not DistributedSampler.__iter__:
            raise DataError(
                f"the DataLoader's {type(sampler).__name__} divides the data in its own way, but "
                "the engine spreads it itself: give it a sampler of the whole data."
            )
        self._sampler = sampler

    def __len__(self) -> int:
        rows: int = len(self._sampler.dataset)  # type: ignore[arg-type]
        return min(rows, self._sampler.total_size)

    def __iter__(self) -> Iterator[int]:
        parts = []
        for rank in range(self._sampler.num_replicas):
            part = copy.copy(self._sampler)  # with the epoch that the script has set
            part.rank = rank
            parts.append(list(part))
        turns = itertools.chain.from_iterable(zip(*parts, strict=True))
        return itertools.islice(turns, len(self))


class _OwnOrder:
    """What a sampler of the user's own draws for each epoch: the same on every process."""

    def __init__(self, sampler: Any, gather_digests: Callable[[str], Sequence[str]] | None) -> None:
        self._sampler, self._gather_digests = sampler, gather_digests
        """How the ranks compare what they have drawn; None once they have."""

    def draw(self) -> list[Any]:
        keys, gather = list(self._sampler), self._gather_digests
        self._gather_digests = None
        if gather is not None:
            digest = hashlib.sha256(repr(keys).encode()).hexdigest()
            if len(set(gather(digest))) > 1:
                raise DataError(
                    f"{type(self._sampler).__name__} gives each process another order: it divides "
                    "the data by rank, or draws from random numbers of its own. Every process must "
                    "get the same, of the whole data: the loader deals it out itself."
                )
        return keys


class _BatchLoader(DistributedLoader):
    """Its samples are the batches that a sampler makes for each epoch."""

    def list_samples(self, epoch: int, positions: range) -> list[int]:
        """Their places in the epoch: made again, they might be others."""
        return list(positions)


class _Batches:
    """The batches of an epoch, by their number."""

    def __init__(
        self,
        dataset: Any,
        sampler: Any,
        gather_digests: Callable[[str], Sequence[str]] | None,
        *,
        takes_rows: bool,
    ) -> None:
        self._dataset, self._sampler, self._takes_rows = dataset, sampler, takes_rows
        self._order = _OwnOrder(sampler, gather_digests)
        self._keys: list[Any] = []
        self.fingerprint = getattr(dataset, "fingerprint", None)

    def __len__(self) -> int:
        return len(self._sampler)

    def draw(self) -> Sequence[int]:
        """Make the batches of the next epoch."""
        self._keys = self._order.draw()
        if len(self._keys) != len(self):
            raise DataError(
                f"{type(self._sampler).__name__} gave {len(self._keys)} batches, and its length is "
                f"{len(self)}: its __len__() must count the batches of an epoch."
            )
        return range(len(self._keys))

    def __getitem__(self, number: int) -> Any:
        key = self._keys[number]
        if not self._takes_rows:
            return self._dataset[key]
        fetch_many = getattr(self._dataset, "__getitems__", None)
        return fetch_many(key) if fetch_many else [self._dataset[index] for index in key]


def _collate_one(collate: Collate, batches: list[Any]) -> Any:
    """The user's collate function, for the one batch that a micro-batch consists of."""
    return collate(batches[0])
