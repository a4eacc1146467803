"""Streams of several data sets as one: which set a sample is from depends on its number alone.

Each set has steps of its own, so the sets may have different columns. One that is at its end begins
again, in another order: there is no end, and so no epoch. The position is that of every set.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np

from rapidformer.data.mixture import FromSet, choose_sets, count_sets, describe_share, fetch_by_set
from rapidformer.data.streams.reader import State
from rapidformer.data.streams.stream import Reading, Step, StreamRows
from rapidformer.errors import DataError


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
