"""A user's DataLoader, split over the ranks with all of its settings.

Data set, collate function, batch size, workers and order carry over. A sampler of the user's own
decides the order (it must give the same one on every process); a batch sampler cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from rapidformer.data.data_source import is_stream
from rapidformer.data.loader import DistributedLoader
from rapidformer.errors import DataError


def adopt_loader(
    loader: DataLoader[object],
    *,
    num_replicas: int,
    replica: int,
    rounds_per_update: int,
    seed: int,
    device: torch.device,
    gather_digests: Callable[[str], Sequence[str]] | None = None,
    batch_size: int | None = None,
) -> DistributedLoader:
    """The same data in the same batches (or in batches of another size), divided over the ranks."""
    streams = is_stream(loader.dataset)
    if loader.batch_size is None or (
        not streams and type(loader.batch_sampler) is not BatchSampler
    ):
        raise DataError(
            "the DataLoader makes its batches with a batch sampler of its own, which cannot be "
            "spread over processes: give it batch_size= (and sampler=, if you have an order)."
        )
    sampler = None if streams else loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise DataError(
            "the DataLoader has a DistributedSampler, but the engine spreads the data itself: "
            "leave the sampler out (shuffle=True for a shuffled order)."
        )
    is_random = (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    has_own_order = sampler is not None and not (
        is_random or isinstance(sampler, SequentialSampler)
    )
    return DistributedLoader(
        loader.dataset,
        collate=loader.collate_fn,
        micro_batch_size=batch_size or loader.batch_size,
        num_replicas=num_replicas,
        replica=replica,
        rounds_per_update=rounds_per_update,
        shuffle=is_random,
        seed=seed,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        device=device,
        gather_digests=gather_digests,
        order=(lambda: list(sampler)) if has_own_order and sampler is not None else None,
        num_samples=len(sampler) if has_own_order and isinstance(sampler, Sized) else None,
    )
