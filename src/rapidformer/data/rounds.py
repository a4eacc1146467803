"""How an epoch is ordered and cut into rounds, updates and slices: by seed and position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rapidformer.data.data_source import Take, find_length
from rapidformer.data.fetching import Dealt
from rapidformer.data.mixture import FromSet, Sets
from rapidformer.data.random_numbers import random_numbers_from
from rapidformer.errors import DataError

Numbers = Sequence[int] | np.ndarray[Any, Any]


class EpochOrder:
    """Which sample comes at which place; depends only on the seed and the epoch."""

    def __init__(
        self, size: int, seed: int, *, shuffle: bool,
        draw: Callable[[], Sequence[int]] | MixedOrder | None,
    ) -> None:  # fmt: skip
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
        if isinstance(self._draw, RepeatedOrder):
            how = "shuffled" if self._draw.is_shuffled else "as stored"
            return f"{how}, each batch {self._draw.repeats} times"
        if isinstance(self._draw, MixedOrder):
            shares = " : ".join(f"{weight:g}" for weight in self._draw.sets.weights or ())
            how = "shuffled" if self._draw.is_shuffled else "as stored"
            return f"{how}, sets mixed {shares} until {self._draw.sets.stopping}"
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
        if isinstance(self._draw, MixedOrder):
            return self._draw.draw(self._seed, epoch)
        if self._draw is not None:
            with random_numbers_from((self._seed, epoch)):
                return self._draw()
        if not self.is_shuffled:
            return range(self._size)
        return np.random.default_rng((self._seed, epoch)).permutation(self._size)


@dataclass(frozen=True)
class MixedOrder:
    """An order in which data sets take turns by their weights."""

    sets: Sets
    is_shuffled: bool

    def draw(self, seed: int, epoch: int) -> Numbers:
        """The rows of an epoch."""
        return self.sets.list_numbers(seed, epoch, shuffles=self.is_shuffled)

    def __len__(self) -> int:
        return self.sets.num_samples


@dataclass(frozen=True)
class RepeatedOrder:
    """Draws an order in which each global batch comes several times in a row; a smaller one, which
    is the last, comes once."""

    size: int
    batch_size: int
    repeats: int
    is_shuffled: bool

    def __call__(self) -> list[int]:
        order = np.random.permutation(self.size) if self.is_shuffled else np.arange(self.size)
        end = self._count_repeated()
        batches = order[:end].reshape(-1, 1, self.batch_size).repeat(self.repeats, 1)
        return [*batches.ravel().tolist(), *order[end:].tolist()]

    def __len__(self) -> int:
        return self.size + (self.repeats - 1) * self._count_repeated()

    def _count_repeated(self) -> int:
        return self.size // self.batch_size * self.batch_size


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds of an epoch; one is a micro-batch on every rank."""

    micro_batch_size: int
    num_replicas: int
    replica: int
    per_update: int
    num_samples: int
    """Samples in an epoch; 0 for a stream."""
    whole: int
    """Rounds that an epoch has a multiple of: what is left over is dropped. 0: nothing is."""
    get_batch_size: Callable[[int], int] | None
    """Samples of the next update after this many samples, if updates differ in size."""
    token_budget: int | None
    """Tokens per micro-batch, if micro-batches are limited by tokens and not by samples."""

    @property
    def samples(self) -> int:
        """Samples of a round, over all ranks."""
        return self.micro_batch_size * self.num_replicas

    @property
    def samples_per_update(self) -> int:
        return self.samples * self.per_update

    @property
    def num_used(self) -> int:
        """Samples that the rounds of an epoch take: fewer than it has, if the last are dropped."""
        return min(self.count_after(0) * self.samples, self.num_samples)

    def count_after(self, consumed: int) -> int:
        """Rounds left in the epoch after this many of its samples."""
        if not self.whole:
            return -(-(self.num_samples - consumed) // self.samples)
        together = self.samples * self.whole
        end = self.num_samples // together * together
        if self.get_batch_size is not None:
            return max(end - consumed, 0) // self.samples
        return max(self.num_samples - consumed, 0) // together * self.whole

    def get_update_size(self, epoch: int, consumed: int) -> int:
        """Samples of the update that begins after this many samples of the epoch."""
        if self.get_batch_size is None:
            return self.samples_per_update
        return self.get_batch_size(epoch * self.num_samples + consumed)

    def check_size(self) -> None:
        """Refuse data that is too small for a single update."""
        if self.num_samples == 0:
            raise DataError("the data set is empty: there is nothing to train or evaluate on.")
        if self.count_after(0) == 0:
            raise DataError(
                f"the data set has {self.num_samples} samples, less than one global batch of "
                f"{self.samples * self.whole}, and the last, smaller batch is dropped: use a "
                "smaller --global-batch-size, or --keep-last."
            )

    def deal(
        self, order: Numbers, lengths: Sequence[int] | None, epoch: int, consumed: int
    ) -> Iterator[Dealt]:
        """This rank's micro-batches; the epoch's last (with a budget, each update's) is marked."""
        if self.token_budget is not None:
            assert lengths is not None
            start, end = consumed, self.num_samples
            if self.whole:
                end = start + self.count_after(start) * self.samples
            while start < end:
                size = min(self.get_update_size(epoch, start), end - start)
                samples = [int(i) for i in order[start : start + size]]
                yield from self._deal_by_tokens(start, samples, [lengths[i] for i in samples])
                start += size
            return
        end = consumed + self.count_after(consumed) * self.samples
        for start in range(consumed, end, self.samples):
            samples = [int(i) for i in order[start : start + self.samples]]
            yield self._deal_round(start, samples, is_last=start + self.samples == end)

    def deal_stream(self, take: Take, epoch: int, consumed: int) -> Iterator[Dealt]:
        """The same for a stream, whose samples are read in order; each is dealt with its number."""
        if self.token_budget is not None:
            for start, samples in self._read(take, epoch, consumed):
                lengths = [measure_sample(sample) for _, sample in samples]
                yield from self._deal_by_tokens(start, samples, lengths)
            return
        rounds = self._read(take, epoch, consumed)
        current = next(rounds, None)
        while current is not None:
            following = next(rounds, None)
            yield self._deal_round(*current, is_last=following is None)
            current = following

    def _deal_round(self, start: int, samples: list[Any], *, is_last: bool) -> Dealt:
        """This rank's slice of a round, whose first sample is ``start``."""
        mine = samples[self.micro_batch_size * self.replica :][: self.micro_batch_size]
        # Its place in the one global order, which is the same for any number of ranks.
        number = start // self.micro_batch_size + self.replica
        return number, mine or samples[:1], not mine, is_last

    def _deal_by_tokens(
        self, start: int, samples: list[Any], lengths: Sequence[int]
    ) -> Iterator[Dealt]:
        """This rank's micro-batches of one update, which begins with sample ``start``."""
        assert self.token_budget is not None
        parts = split_by_tokens(lengths, self.token_budget, self.num_replicas)
        for place in range(self.replica, len(parts), self.num_replicas):
            mine = [samples[index] for index in parts[place]]
            is_last = place + self.num_replicas >= len(parts)
            yield start + place, mine or samples[:1], not mine, is_last

    def _read(self, take: Take, epoch: int, consumed: int) -> Iterator[tuple[int, list[Any]]]:
        """The rounds (with a budget, updates) of a stream; whole ones if the last is dropped."""
        waiting: list[tuple[int, list[Any]]] = []
        has_budget = self.token_budget is not None
        start = consumed
        while True:
            size = self.get_update_size(epoch, start) if has_budget else self.samples
            samples = take(size)
            if not samples or (self.whole and len(samples) < size):
                return
            waiting.append((start, list(enumerate(samples, start))))
            start += size
            if has_budget or not self.whole or len(waiting) == self.whole:
                yield from waiting
                waiting = []


# --- batches of similar length, which pad least: --group-by-length, --tokens-per-micro-batch ------


def measure_lengths(dataset: Any, column: str, flag: str = "--group-by-length") -> list[int]:
    """The length of every sample: a column of the data, or the number of its tokens."""
    if find_length(dataset) is None:
        raise DataError(f"{flag} needs to know all lengths: a stream has no length.")
    names = getattr(dataset, "column_names", None) or []
    if column in names:
        return [_to_length(value, column) for value in dataset[column]]
    if "input_ids" in names:
        return [len(ids) for ids in dataset["input_ids"]]
    try:
        return [_measure(dataset[index], column) for index in range(len(dataset))]
    except (TypeError, KeyError, IndexError):
        raise DataError(
            f"{flag}: the samples have neither a column {column!r} nor input_ids. Name the column "
            "of their lengths, or that of their tokens, with --length-column."
        ) from None


def measure_sample(sample: Any) -> int:
    """The tokens of a stream's sample."""
    if isinstance(sample, FromSet):
        sample = sample.sample
    try:
        return len(sample["input_ids"])
    except (TypeError, KeyError, IndexError):
        raise DataError(
            "--tokens-per-micro-batch: the samples of the stream have no input_ids to count: "
            "use --micro-batch-size."
        ) from None


def _measure(sample: Any, column: str) -> int:
    if isinstance(sample, Mapping) and column in sample:
        return _to_length(sample[column], column)
    return len(sample["input_ids"])


def _to_length(value: Any, column: str) -> int:
    """A length, or that of tokens."""
    is_text = isinstance(value, str)  # characters are not tokens
    is_sequence = isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0
    try:
        return len(value) if is_sequence and not is_text else int(value)
    except (TypeError, ValueError):
        raise DataError(
            f"--length-column {column}: {str(value)[:40]!r} is neither a length nor a list of "
            "tokens. Name another column."
        ) from None


@dataclass
class GroupedOrder:
    """An order by groups of similar length, by torch's numbers and the first batch size alone.

    It is transformers': the samples are shuffled, cut into groups of many batches, and each group
    is sorted by length, so that the order stays random between groups. The longest sample of all
    comes first: what does not fit into memory fails at once.
    """

    lengths: Sequence[int]
    batch_size: int

    def __call__(self) -> list[int]:
        from transformers.trainer_pt_utils import get_length_grouped_indices

        return get_length_grouped_indices(self.lengths, self.batch_size)


def sort_in_groups(
    sizes: Sequence[int], lengths: Sequence[int] | None, start: int = 0
) -> list[int]:
    """Samples from ``start`` on, in groups of these sizes, each longest first if known."""
    order: list[int] = []
    for size in sizes:
        group = range(start + len(order), start + len(order) + size)
        order += group if lengths is None else sorted(group, key=lambda i: -lengths[i])
    return order


def split_by_tokens(lengths: Sequence[int], budget: int, num_ranks: int) -> list[list[int]]:
    """The micro-batches of an update, as indices of its samples; a multiple of ``num_ranks``.

    For --tokens-per-micro-batch: an update takes the samples it always takes, but cuts them into
    micro-batches of similar length, of at most ``budget`` tokens with padding, as many and about as
    large on every rank. Micro-batch i is for rank i modulo ``num_ranks``; it is empty if there are
    too few samples. A sample longer than the budget gets a micro-batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    sizes = [max(lengths[index], 1) for index in order]
    budget = max(budget, sizes[0])
    count = -(-len(_cut(sizes, budget)) // num_ranks) * num_ranks
    # The smallest limit that needs no more micro-batches than the budget: it balances them.
    low, high = sizes[0], budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(sizes, middle)) <= count else (middle + 1, high)
    pieces = _cut(sizes, high)

    def measure(piece: range) -> int:
        return len(piece) * sizes[piece.start] if piece else 0

    while len(pieces) < count:
        # Halve the largest, so that every rank has work; a single sample leaves one half empty.
        largest = max(pieces, key=lambda piece: (len(piece) > 1, measure(piece)))
        pieces.remove(largest)
        pieces += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    # Ranks work on neighbours at the same time: these should be of equal size.
    pieces.sort(key=measure, reverse=True)
    return [sorted(order[place] for place in piece) for piece in pieces]


def _cut(sizes: Sequence[int], limit: int) -> list[range]:
    """Neighbours of a descending list, as many together as their padded size allows."""
    starts = [0]
    for place in range(1, len(sizes)):
        if (place - starts[-1] + 1) * sizes[starts[-1]] > limit:
            starts.append(place)
    return [range(*ends) for ends in zip(starts, [*starts[1:], len(sizes)], strict=True)]
