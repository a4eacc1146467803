"""Loaders of a subclass that are none of torch's: whatever gives batches, as for several tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from rapidformer.data.data_source import find_length
from rapidformer.data.loader import DistributedLoader
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import DataError


class _Batches(IterableDataset[Any]):
    """Each batch is one sample."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)


def _leave(batch: Any) -> Any:
    return batch


def adopt_loader(engine: RapidformerEngine, loader: Any, *, is_training: bool) -> DistributedLoader:
    """A loader of the trainer's or of torch's, or of any other kind in one process."""
    if isinstance(loader, (DataLoader, DistributedLoader)):
        adopted = engine.data.adopt_loader(loader, is_training=is_training)
        samples = find_length(adopted.dataset)
    else:
        adopted = engine.data.adopt_loader(_make_torchs(engine, loader), is_training=is_training)
        samples = find_length(loader)
    if is_training and adopted.is_stream and samples is not None:
        # A stream that says its length decides how long a run of so many epochs is.
        rounds, rest = divmod(samples, adopted.samples_per_round)
        rounds += bool(rest and engine.args.keep_last)
        updates = -(-rounds // engine.updates.clock.rounds_per_update)
        adopted.updates_per_epoch = max(1, updates)
    return adopted


def _make_torchs(engine: RapidformerEngine, loader: Any) -> DataLoader[Any]:
    kind, replicas = type(loader).__name__, engine.args.data_parallel_size
    if not isinstance(loader, Iterable):
        raise DataError(f"a loader must give batches, got {kind}, which cannot be iterated over.")
    if replicas > 1:
        raise DataError(
            f"a {kind} cannot be divided over {replicas} processes: return a torch DataLoader. For "
            "batches that are made elsewhere, that is DataLoader(dataset, batch_size=None), whose "
            "data set gives all of them on every process."
        )
    return DataLoader(_Batches(loader), batch_size=None, collate_fn=_leave)
