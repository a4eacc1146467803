"""Several data sets as one: which set a sample is from, and which row of it, by its number alone.

The rows of all sets have numbers, one set after the other. An epoch is a list of such numbers. With
weights, the set of each sample follows the rule of pre-training's blends (``blend.py``): the set
furthest behind its share gives the next one. Each set goes through its own rows again and again,
whatever the epoch of the mixture: in new order each time, if the run is shuffled.

Streams are mixed by the same rule. Each has steps of its own, so the sets may have different
columns; one that is at its end begins again, in another order: there is no end, and so no epoch.
The position is that of every set.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from rapidformer.data.data_source import Rows
from rapidformer.data.pretraining.blend import choose_datasets
from rapidformer.data.streams.reader import State
from rapidformer.data.streams.stream import Reading, Step, StreamRows
from rapidformer.errors import DataError

_PERIOD = 2**20
"""``choose_sets`` repeats itself after so many samples, so that no number is too large for it."""
_BLOCK = 1024
_LONGEST_EPOCH = 2**28


def choose_sets(weights: Sequence[float], seed: int | None, start: int, count: int) -> np.ndarray:
    """The sets of the samples ``start`` to ``start + count``.

    Each thousand or so samples have the sets in the proportion of their weights, in an order drawn
    from the seed; without a seed, as evenly spread as they can be.
    """
    first, last = start // _BLOCK, -(-(start + count) // _BLOCK)
    # A few sizes only: each is computed once.
    size = min(1 << (last * _BLOCK - 1).bit_length(), _PERIOD)
    pattern = _spread(_normalize(weights), size)
    chosen = pattern[np.arange(first * _BLOCK, last * _BLOCK) % len(pattern)].reshape(-1, _BLOCK)
    if seed is not None:
        for number, block in enumerate(chosen, start=first):
            block[:] = np.random.default_rng((seed % 2**63, number)).permutation(block)
    return chosen.reshape(-1)[start - first * _BLOCK :][:count]


def _normalize(weights: Sequence[float]) -> tuple[float, ...]:
    total = sum(weights)
    return tuple(weight / total for weight in weights)


@lru_cache(maxsize=8)
def _spread(weights: tuple[float, ...], size: int) -> np.ndarray:
    return choose_datasets(np.asarray(weights), size)


def count_sets(weights: Sequence[float], seed: int | None, count: int) -> list[int]:
    """How many of the first samples are from each set."""
    whole = count // _PERIOD * _PERIOD
    counts = np.bincount(choose_sets(weights, seed, whole, count - whole), minlength=len(weights))
    if whole:  # all periods have the same sets, in whatever order
        period = np.bincount(choose_sets(weights, None, 0, _PERIOD), minlength=len(weights))
        counts = counts + whole // _PERIOD * period
    return [int(number) for number in counts]


class FromSet(NamedTuple):
    """A sample of a mixture of streams, and the number of its set."""

    number: int
    sample: Any


@dataclass(frozen=True)
class Sets:
    """The sets of a mixture, and the samples of its epochs."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    """None: an epoch has every row of every set once."""
    stopping: str = "first"

    def find(self, number: int) -> int:
        """The set of a row."""
        return int(np.searchsorted(self._ends, number, side="right"))

    def find_row(self, number: int) -> str:
        """A row by its set and its number there, from 1 up."""
        found = self.find(number)
        return f"{self.names[found]}, row {number - self.get_range(found).start + 1}"

    def get_range(self, number: int) -> range:
        """The rows of a set."""
        end = int(self._ends[number])
        return range(end - self.sizes[number], end)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.sizes)

    @cached_property
    def _epoch(self) -> np.ndarray:
        """The sets of an epoch's samples, as evenly spread as they can be."""
        assert self.weights is not None
        weights = np.asarray(_normalize(self.weights))
        # When each set has given all of its rows; rounded, or a third of 6 would be more than 2.
        ends = np.round(np.asarray(self.sizes) / weights, 6)
        if self.stopping == "first":
            chosen = choose_datasets(weights, int(np.floor(ends.min())))
            return chosen[: min(self._find_places(chosen, 0))]
        size = int(np.ceil(ends.max()))
        if size > _LONGEST_EPOCH:
            raise DataError(
                f"--data-stopping all: an epoch would have {size:,} samples, since "
                f"{self.names[int(np.argmax(ends))]} is large for its weight. Use "
                "--data-stopping first, and --train-iters for the length of the run."
            )
        chosen = choose_datasets(weights, size + len(weights) + int(3 / weights.min()))
        return chosen[: max(size, 1 + max(self._find_places(chosen, -1)))]

    def _find_places(self, chosen: np.ndarray, offset: int) -> list[int]:
        """Where each set gives its first row for the second time, or so many samples of it on."""
        places = [np.flatnonzero(chosen == number) for number in range(len(self.sizes))]
        ranks = [size + offset for size in self.sizes]
        return [
            int(found[rank]) if rank < len(found) else len(chosen)
            for found, rank in zip(places, ranks, strict=True)
        ]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Samples of each set in an epoch."""
        if self.weights is None:
            return self.sizes
        return tuple(np.bincount(self._epoch, minlength=len(self.sizes)).tolist())

    @property
    def num_samples(self) -> int:
        return sum(self.counts)

    def list_numbers(self, seed: int, epoch: int, *, shuffles: bool) -> np.ndarray:
        """The rows of an epoch of a weighted mixture, in its order."""
        chosen = self._epoch
        if shuffles:
            chosen = np.random.default_rng((seed, epoch)).permutation(chosen)
        numbers = np.empty(len(chosen), dtype=np.int64)
        for number, count in enumerate(self.counts):
            rows = self._take(number, epoch * count, count, seed if shuffles else None)
            numbers[chosen == number] = self.get_range(number).start + rows
        return numbers

    def _take(self, number: int, start: int, count: int, seed: int | None) -> np.ndarray:
        """Rows of a set, after so many of them in all epochs before."""
        size = self.sizes[number]
        first, last = start // size, -(-(start + count) // size)
        passes = [
            np.arange(size)
            if seed is None
            else np.random.default_rng((seed, number, turn, 1)).permutation(size)
            for turn in range(first, last)
        ]
        rows = np.concatenate([np.empty(0, dtype=np.int64), *passes])
        return rows[start - first * size :][:count]

    def count_samples(self, numbers: Sequence[int]) -> list[int]:
        """How many of these rows are from each set."""
        sets = np.searchsorted(self._ends, np.asarray(numbers, dtype=np.int64), side="right")
        return np.bincount(sets, minlength=len(self.sizes)).tolist()

    def describe(self, counts: Sequence[int]) -> list[str]:
        """A line for each set: its share of so many samples, and its epochs in them."""
        return [
            f"{line}, {count / size:.2f} epochs of {size:,} rows"
            for line, count, size in zip(
                describe_share(self.names, counts), counts, self.sizes, strict=True
            )
        ]


def describe_share(names: Sequence[str], counts: Sequence[int]) -> list[str]:
    """A line for each set: its share of the samples."""
    total, width = sum(counts) or 1, max(map(len, names))
    return [
        f"mixture   {name:<{width}} {100 * count / total:5.1f} % = {count:,} samples"
        for name, count in zip(names, counts, strict=True)
    ]


class JoinedRows:
    """The rows of all sets, one set after the other."""

    def __init__(self, parts: Sequence[Any], sets: Sets) -> None:
        self._parts = [Rows(part) for part in parts]
        self.sets = sets

    def __len__(self) -> int:
        return sum(self.sets.sizes)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([range(len(self))[number]])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        found = [self.sets.find(number) for number in numbers]
        own = [n - self.sets.get_range(s).start for n, s in zip(numbers, found, strict=True)]
        return fetch_by_set(self._parts, found, own)


def fetch_by_set(parts: Sequence[Any], found: Sequence[int], numbers: Sequence[Any]) -> list[Any]:
    """The rows with these numbers, each from its own set; a set is asked once."""
    rows: list[Any] = [None] * len(numbers)
    for part in set(found):
        places = [place for place, other in enumerate(found) if other == part]
        fetched = parts[part].get_rows([numbers[place] for place in places])
        for place, row in zip(places, fetched, strict=True):
            rows[place] = row
    return rows


@dataclass(frozen=True)
class StreamSets:
    """The sets of a mixture of streams, as log lines and losses name them."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    is_shuffled: bool

    @staticmethod
    def find(dealt: tuple[int, FromSet]) -> int:
        """The set of a sample that was dealt out with its number."""
        return dealt[1].number

    def choose(self, seed: int, start: int, count: int) -> list[int]:
        """The sets of some samples."""
        chosen = choose_sets(self.weights, seed if self.is_shuffled else None, start, count)
        return [int(number) for number in chosen]

    def describe(self, seed: int, samples: int) -> list[str]:
        """A line for each set: its share of so many samples."""
        counts = count_sets(self.weights, seed if self.is_shuffled else None, samples)
        return describe_share(self.names, counts)


class MixedStream(StreamRows):
    """Streams that take turns by their weights."""

    def __init__(self, parts: Mapping[str, StreamRows], weights: Sequence[float]) -> None:
        self._parts = list(parts.values())
        super().__init__([shard for part in self._parts for shard in part.shards])
        self.is_expanded = any(part.is_expanded for part in self._parts)
        self.is_shuffled = any(part.is_shuffled for part in self._parts)
        self.sets = StreamSets(tuple(parts), tuple(weights), self.is_shuffled)

    @cached_property
    def fingerprint(self) -> str | None:
        text = repr(([part.fingerprint for part in self._parts], self.sets.weights))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def head(self) -> list[Any]:
        """The first samples of all sets."""
        return [sample for part in self._parts for sample in part.head]

    def peek(self, count: int) -> list[Any]:
        """The first samples of all sets by turns."""
        turns = zip_longest(*(part.peek(count) for part in self._parts))
        return [sample for turn in turns for sample in turn if sample is not None][:count]

    def without_decoding(self, kind: str) -> MixedStream:
        parts = [part.without_decoding(kind) for part in self._parts]
        return MixedStream(dict(zip(self.sets.names, parts, strict=True)), self.sets.weights)

    def then(self, step: Step, *, expands: bool) -> MixedStream:
        steps = [part.then(step, expands=expands) for part in self._parts]
        return MixedStream(dict(zip(self.sets.names, steps, strict=True)), self.sets.weights)

    def get_rows(self, numbers: Sequence[tuple[int, FromSet]]) -> list[Any]:
        own = [(number, taken.sample) for number, taken in numbers]
        return fetch_by_set(self._parts, [taken.number for _, taken in numbers], own)

    def read(
        self, seed: int, epoch: int, position: int, *, cursor: State | None = None,
        num_workers: int = 0, encodes: bool = False, repeats: bool = True,
    ) -> MixedReading:  # fmt: skip
        if cursor is None or cursor["data"] != self.fingerprint or cursor["samples"] > position:
            cursor = {"samples": 0, "state": [(0, None)] * len(self._parts)}
        for name, part in zip(self.sets.names, self._parts, strict=True):
            if part.is_expanded and not part.head:  # it would be read for ever
                raise DataError(f"{name}: no sample can be made of its first rows.")
        options: dict[str, Any] = {"encodes": encodes or self.is_expanded, "repeats": True}
        options["num_workers"] = -(-num_workers // len(self._parts))
        readings = [
            part.read(_draw_seed(seed, number), 0, taken, cursor=inner, **options)
            for number, (part, (taken, inner)) in enumerate(
                zip(self._parts, cursor["state"], strict=True)
            )
        ]
        reading = MixedReading(self, seed, readings, cursor)
        reading.skip(position - cursor["samples"])
        return reading


def _draw_seed(seed: int, number: int) -> int:
    """A seed for each set: in the same file twice, rows come in different orders."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


class MixedReading(Reading):
    """Samples of several streams, without an end; a cursor has the place in each of them."""

    def __init__(
        self, stream: MixedStream, seed: int, readings: Sequence[Reading], cursor: State
    ) -> None:
        self._stream, self._sets, self._seed = stream, stream.sets, seed
        self._readings, self._samples = readings, cursor["samples"]
        self._taken = [taken for taken, _ in cursor["state"]]
        """Samples of each set so far."""
        self._marks: deque[tuple[int, Any]] = deque([(self._samples, self._tell())])

    def _tell(self) -> list[Any]:
        pairs = zip(self._taken, self._readings, strict=True)
        return [[taken, reading.locate(taken)] for taken, reading in pairs]

    def close(self) -> None:
        for reading in self._readings:
            reading.close()

    def __call__(self, count: int) -> list[Any]:
        self._marks.append((self._samples, self._tell()))
        chosen = self._sets.choose(self._seed, self._samples, count)
        self._samples += count
        waiting = []
        for number, reading in enumerate(self._readings):
            samples = reading(chosen.count(number))
            self._taken[number] += len(samples)
            waiting.append(iter(samples))
        return [FromSet(number, next(waiting[number])) for number in chosen]
