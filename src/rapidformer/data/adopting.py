"""A user's DataLoader as one that divides its data over the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
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
    if isinstance(sampler, DistributedSampler):
        raise DataError(
            "the DataLoader has a DistributedSampler, but the engine spreads the data itself: "
            "leave the sampler out (shuffle=True for a shuffled order)."
        )
    given = sampler
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
        order=None if sampler is None else lambda: list(sampler),
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
        self._gather_digests = gather_digests
        """How the ranks compare their batches; None once they have."""
        self._keys: list[Any] = []
        self.fingerprint = getattr(dataset, "fingerprint", None)

    def __len__(self) -> int:
        return len(self._sampler)

    def draw(self) -> Sequence[int]:
        """Make the batches of the next epoch."""
        self._keys, name = list(self._sampler), type(self._sampler).__name__
        if len(self._keys) != len(self):
            raise DataError(
                f"{name} gave {len(self._keys)} batches, and its length is {len(self)}: its "
                "__len__() must count the batches of an epoch."
            )
        gather, self._gather_digests = self._gather_digests, None
        if gather is not None:
            digest = hashlib.sha256(repr(self._keys).encode()).hexdigest()
            if len(set(gather(digest))) > 1:
                raise DataError(
                    f"{name} gives each process other batches: it divides the data by rank, or "
                    "draws from random numbers of its own. Every process must get the same "
                    "batches: the loader deals them out itself."
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
