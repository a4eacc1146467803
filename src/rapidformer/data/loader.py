"""The loader: one global order of samples, cut the same way for any number of ranks.

A *round* is one micro-batch on every rank. It takes the next R samples of the epoch's order, R =
micro-batch size x ranks, and rank r the r-th slice of them; an update is a fixed number of rounds.
The position is one number of samples, the same on every rank, so a run resumes at the very next
sample, whatever its batch size is by then. A rank without samples in the last round gets a *filler*
(another rank's sample, with weight 0), because all ranks must run the model equally often.

With a token budget, an update takes the same samples, but deals them out in as many rounds as their
lengths need. The position then moves on with each whole update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from rapidformer.data.batch import BatchInfo, copy_batch, describe_batch
from rapidformer.data.data_source import Rows, open_source
from rapidformer.data.fetching import Collate, Dealt, Fetcher, Parcel
from rapidformer.data.mixture import Sets, StreamSets
from rapidformer.data.random_numbers import random_numbers_from
from rapidformer.data.rounds import EpochOrder, MixedOrder, Rounds
from rapidformer.data.streams.stream import Reading, StreamRows, build_worker_loader
from rapidformer.data.update import MicroBatch, Update, read_ahead
from rapidformer.dist.heartbeat import beat
from rapidformer.errors import DataError, RapidformerError

IterableDataset.register(StreamRows)  # so that torch's DataLoader and Trainer take one as well
Follow = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]


class DistributedLoader:
    """Yields this process's micro-batches of an epoch, on the device."""

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Collate,
        micro_batch_size: int,
        num_replicas: int = 1,
        replica: int = 0,
        rounds_per_update: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        keeps_rounds: bool = False,
        num_workers: int = 0,
        device: torch.device | None = None,
        order: Callable[[], Sequence[int]] | MixedOrder | None = None,
        num_samples: int | None = None,
        tells_sets: bool = False,
        get_batch_size: Callable[[int], int] | None = None,
        token_budget: int | None = None,
        lengths: Sequence[int] | None = None,
        gather_digests: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        """``drop_last`` drops an epoch's last, smaller update; with ``keeps_rounds`` only its last,
        smaller round, as torch's DataLoader does."""
        self.dataset = dataset
        self.source = open_source(dataset, gather_digests)
        self.collate_fn = collate
        self.batch_size = micro_batch_size
        # NumPy takes no negative seeds; torch and Python do.
        self.seed = seed % 2**63
        size = self.source.size
        self._order = EpochOrder(size or 0, self.seed, shuffle=shuffle, draw=order)
        self.is_shuffled = shuffle
        self.sets: Sets | StreamSets | None = getattr(dataset, "sets", None)
        """The data sets that it is a mixture of."""
        self._tells_sets = tells_sets and self.sets is not None
        self.sampler: Any = None
        """The sampler of the user's DataLoader, if it was made from one."""
        self._num_workers = num_workers
        self.device = device or torch.device("cpu")
        self._lengths = lengths
        """Tokens of every sample; not known beforehand for a stream."""
        self.is_stream = size is None
        self.num_samples = 0 if size is None else size if num_samples is None else num_samples
        """Samples in an epoch: the data set's, or those that a sampler of the user's own gives."""
        self._cut = Rounds(
            micro_batch_size=micro_batch_size, num_replicas=num_replicas, replica=replica,
            per_update=rounds_per_update, num_samples=self.num_samples,
            whole=0 if not drop_last else 1 if keeps_rounds else rounds_per_update,
            get_batch_size=get_batch_size, token_budget=token_budget,
        )  # fmt: skip
        self.samples_per_round = self.total_batch_size = self._cut.samples
        self.samples_per_update = self._cut.samples_per_update
        self.updates_per_epoch = -(-self._cut.count_after(0) // rounds_per_update)
        """Of a stream 0, unless somebody knows them."""
        self.has_token_budget = token_budget is not None
        """Whether updates differ in their number of micro-batches."""
        self.tells_epoch = True
        """Whether a data set with ``set_epoch`` is told when a pass begins."""
        self.epoch = 0
        self.consumed_samples = 0
        """Samples of the current epoch that have been handed out, over all ranks."""
        self._rounds = 0
        """Rounds of the current pass so far, counted from the start of an update."""
        self._update_start = 0
        """Samples of the epoch before the current update."""
        self._is_resuming = False
        self._gather_digests = gather_digests
        """How the ranks compare their shards of a stream; None once they have."""
        self._reading: Reading | None = None
        self._cursor: dict[str, Any] | None = None
        """Where in a stream's shards the current position is."""
        self.follow: Follow | None = None
        """Sees micro-batches go by on their way to a loop that asks for them one by one."""
        if not self.is_stream:
            self._cut.check_size()

    def describe_order(self) -> str:
        """How the samples of an epoch are ordered."""
        return self._order.describe()

    def count_updates_done(self) -> int:
        """Updates until here, if all had been as large as they are now."""
        left = -(-self._cut.count_after(self.consumed_samples) // self._cut.per_update)
        return (self.epoch + 1) * self.updates_per_epoch - left

    def count_epochs_done(self) -> float:
        """Epochs until here. What an epoch drops is no part of it.

        Of a stream they are whole ones, unless somebody knows its updates.
        """
        if self.is_stream and self.updates_per_epoch:
            updates = -(-self.consumed_samples // self.samples_per_update)
            return self.epoch + min(1.0, updates / self.updates_per_epoch)
        used = self._cut.num_used if self.num_samples else 0
        return self.epoch + (self.consumed_samples / used if used else 0.0)

    def __len__(self) -> int:
        """Rounds in an epoch."""
        if self.is_stream:
            raise TypeError(
                "a stream of data has no length: say how long to train in --train-iters"
            )
        if self.has_token_budget:
            raise TypeError(
                "with --tokens-per-micro-batch, the number of micro-batches depends on their "
                "lengths: count optimizer steps (loader.updates_per_epoch)"
            )
        return self._cut.count_after(0)

    @property
    def _may_reuse_memory(self) -> bool:
        """Whether collate may refill a batch's memory while it is needed: not of a copy."""
        if self.device.type == "cuda":
            return self.is_stream and not isinstance(self.source, StreamRows)
        # A step's micro-batches are collected before it runs.
        may_have_several = self._cut.per_update > 1 or self._cut.get_batch_size is not None
        has_own_memory = self._num_workers > 0 and not self.is_stream
        return (may_have_several or self.has_token_budget) and not has_own_memory

    def __iter__(self) -> Iterator[Any]:
        """The bare batches, for a loop of the user's own."""
        for micro_batch in self.iterate_micro_batches():
            yield micro_batch.batch

    def iterate_micro_batches(self) -> Iterator[MicroBatch]:
        """The micro-batches of an epoch with their facts, one by one."""
        micro_batches = self._hand_out()
        yield from self.follow(micro_batches) if self.follow else micro_batches

    def iterate_updates(self, stays_on_host: Callable[[], bool] | None = None) -> Iterator[Update]:
        """The updates of an epoch; ``stays_on_host`` is for ``read_ahead``."""
        collected: list[MicroBatch] = []
        for micro_batch in self._hand_out(stays_on_host):
            collected.append(micro_batch)
            if micro_batch.is_last:
                update, collected = Update(tuple(collected), self.positions), []
                yield update

    @property
    def positions(self) -> range:
        """The places of the current update's samples in the epoch's order, over all ranks."""
        return range(self._update_start, self.consumed_samples)

    def list_samples(self, epoch: int, positions: range) -> list[int]:
        """The numbers of samples in the data set, or from a stream's start, by their places."""
        if self.is_stream:
            return list(positions)
        return self._order.list_numbers(epoch, positions)

    def list_sets(self, numbers: Sequence[int]) -> list[str]:
        """The data sets that these samples are from."""
        return sorted({self.source.find_set(number) for number in numbers})

    def describe_sets(self, samples: int | None = None) -> list[str]:
        """What so many samples of a run, or those so far, take of each set of a mixture."""
        if self.sets is None:
            return []
        if samples is None:
            samples = self.epoch * self.num_samples + self.consumed_samples
        if isinstance(self.sets, StreamSets):
            return self.sets.describe(self.seed, samples)
        epochs, rest = divmod(samples, self.num_samples)
        begun = self.sets.count_samples(self.list_samples(epochs, range(rest)))
        counts = [epochs * a + b for a, b in zip(self.sets.counts, begun, strict=True)]
        return self.sets.describe(counts)

    def _hand_out(self, stays_on_host: Callable[[], bool] | None = None) -> Iterator[MicroBatch]:
        """Count what is handed out, and mark the last micro-batch of each update."""
        was_resumed = self._is_resuming and self.consumed_samples > 0
        if not self._is_resuming and self.consumed_samples:
            # The last pass was left early: as with any DataLoader, a new one starts an epoch.
            self.epoch, self.consumed_samples = self.epoch + 1, 0
        if not self._is_resuming:
            self._rounds, self._cursor = 0, None
        self._is_resuming, first_round = False, self._rounds
        # As Accelerate does: a shuffled stream of datasets comes in the same order otherwise.
        if self.tells_epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        rounds = self._iterate_stream() if self.is_stream else self._iterate_rounds()
        if self._may_reuse_memory:
            pins = self.device.type == "cuda"
            rounds = (r._replace(batch=copy_batch(r.batch, pins=pins)) for r in rounds)
        rounds = read_ahead(rounds, self.device, stays_on_host)
        rounds_left, starts_update = 0, True
        beat("data")
        for micro_batch in rounds:
            if starts_update:
                self._update_start = self.consumed_samples
            if not self.has_token_budget:
                if not rounds_left and self._cut.get_batch_size is None:
                    rounds_left = self._cut.per_update - self._rounds % self._cut.per_update
                elif not rounds_left:
                    size = self._cut.get_update_size(self.epoch, self.consumed_samples)
                    rounds_left = size // self.samples_per_round
                rounds_left -= 1
                self.consumed_samples += self.samples_per_round
                is_last, is_final = not rounds_left or micro_batch.is_last, micro_batch.is_last
                must_end = is_last if self._cut.get_batch_size is not None else is_final
                micro_batch = micro_batch._replace(is_last=is_last, must_end=must_end)
            elif micro_batch.is_last:
                micro_batch = micro_batch._replace(must_end=True)
                self.consumed_samples += self._cut.get_update_size(
                    self.epoch, self.consumed_samples
                )
            self._rounds += 1
            if not self.is_stream:
                self.consumed_samples = min(self.consumed_samples, self.num_samples)
            if self._reading is not None:
                self._cursor = self._reading.locate(self.consumed_samples)
            starts_update = micro_batch.is_last
            yield micro_batch
            beat("data")
        was_over = was_resumed and self._rounds == first_round
        self.epoch, self.consumed_samples, self._cursor = self.epoch + 1, 0, None
        if was_over:  # a stream does not know beforehand that it was saved at its end
            yield from self._hand_out(stays_on_host)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is no longer followed: nothing is trained on what it yields."""
        return {**self.__dict__, "follow": None, "_reading": None, "_gather_digests": None}

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch's; one that was resumed in the middle stays there."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        if epoch != self.epoch or not self._is_resuming:
            self.epoch, self.consumed_samples, self._is_resuming = epoch, 0, False
            self._cursor = None

    def rewind(self) -> None:
        self.epoch, self.consumed_samples, self._is_resuming = 0, 0, False
        self._cursor = None

    def state_dict(self) -> dict[str, Any]:
        """The global position, valid for any number of processes."""
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "consumed_samples": self.consumed_samples,
            "samples_per_update": self.samples_per_update,
        }
        if self._order.grouped_for is not None:
            state["grouped_for"] = self._order.grouped_for
        if self._cursor is not None:
            state["cursor"] = self._cursor
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the samples that an earlier run has consumed."""
        self.epoch = int(state["epoch"])
        self.consumed_samples = int(state["consumed_samples"])
        self._order.grouped_for = state.get("grouped_for")
        self._cursor = state.get("cursor")
        # In the middle of an update, if its size is still the same; otherwise a new one begins.
        is_same = state.get("samples_per_update") in (None, self.samples_per_update)
        self._rounds = self.consumed_samples // self.samples_per_round if is_same else 0
        if not self.is_stream and self._cut.count_after(self.consumed_samples) == 0:
            self.epoch, self.consumed_samples, self._rounds = self.epoch + 1, 0, 0
        self._is_resuming = True

    def _iterate_rounds(self) -> Iterator[MicroBatch]:
        """An epoch's rounds; the last one (with a token budget, of every update) is marked."""
        if isinstance(self.source, Rows):
            self.source.check_size()
        rounds_left = self._cut.count_after(self.consumed_samples)
        num_workers = min(self._num_workers, rounds_left)
        order = self._order.start(self.epoch)
        dealt = self._cut.deal(order, self._lengths, self.epoch, self.consumed_samples)
        return self._fetch(dealt, num_workers)

    def _fetch(
        self, dealt: Iterator[Dealt], num_workers: int, *, forks: bool = False
    ) -> Iterator[MicroBatch]:
        """The micro-batches that were dealt to this rank, fetched by workers."""
        sets = self.sets if self._tells_sets else None
        fetcher = Fetcher(self.source, self.collate_fn, (self.seed, self.epoch, 0), sets)
        loader = build_worker_loader(
            fetcher, dealt, num_workers, forks=forks,
            # An update is handed out whole: the workers must get that far while another one runs.
            prefetch_factor=max(2, self._cut.per_update // num_workers) if num_workers else None,
            pin_memory=self.device.type == "cuda",
            # A generator of its own: the loader must not draw from the model's random numbers.
            generator=torch.Generator().manual_seed(self.seed),
        )  # fmt: skip
        for batch, info, number, is_filler, is_last, row_sets in loader:
            if isinstance(batch, RapidformerError):
                raise batch
            if isinstance(batch, Parcel):
                batch = batch.unpack()
            facts = BatchInfo(*info), is_filler, is_last, self.epoch, number
            yield MicroBatch(batch, *facts, sets=row_sets)

    def _iterate_stream(self) -> Iterator[MicroBatch]:
        """Every process reads the whole stream and keeps its slice of each round."""
        if isinstance(self.source, StreamRows):
            yield from self._iterate_rows()
            return
        take = self.source.read(self.seed, self.epoch, self.consumed_samples)
        dealt = self._cut.deal_stream(take, self.epoch, self.consumed_samples)
        for number, mine, is_filler, is_last in dealt:
            with random_numbers_from((self.seed, self.epoch, 0, number)):
                batch = self.collate_fn([sample for _, sample in mine])
            info = describe_batch(batch)
            info = info.as_filler() if is_filler else info
            yield MicroBatch(batch, info, is_filler, is_last, self.epoch, number)

    def _iterate_rows(self) -> Iterator[MicroBatch]:
        """The same for a stream that knows where its rows are."""
        assert isinstance(self.source, StreamRows)
        gather, self._gather_digests = self._gather_digests, None
        if gather is not None and len(set(gather(str(self.source.fingerprint)))) > 1:
            raise DataError(
                f"the processes see different shards of {self.source.name}: every node needs the "
                "same files, with the same names and sizes."
            )
        # Either samples are made before they are dealt, or by the workers that collate them.
        is_dealt_whole = self.source.is_expanded or self.has_token_budget
        before, after = (self._num_workers, 0) if is_dealt_whole else (0, self._num_workers)
        reading = self._reading = self.source.read(
            self.seed, self.epoch, self.consumed_samples, cursor=self._cursor,
            num_workers=before, encodes=is_dealt_whole,
        )  # fmt: skip
        dealt = self._cut.deal_stream(reading, self.epoch, self.consumed_samples)
        try:
            yield from self._fetch(dealt, after, forks=True)
        finally:
            reading.close()
