"""The order of a stream: which row comes next, and how to go on from there.

Shards come in an order of their own in each epoch. The rows that follow each other are shuffled in
windows of ``--shuffle-buffer`` rows: the order in a window depends on the seed, the epoch and the
number of its first row alone. So a position is where a window begins, and how many of its rows were
taken: a few numbers, valid for any number of ranks and workers. To resume, one window is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rapidformer.data.files import get_first_line
from rapidformer.data.streams.shards import Shard
from rapidformer.errors import DataError, RapidformerError

State = dict[str, Any]
UNSHUFFLED_WINDOW = 1000
_WINDOW_BYTES = 256 * 2**20
"""A window ends here, however few its rows are: pictures are large."""
_SHARDS, _ROWS, _FIRST = 0, 1, 2
"""What random numbers are for."""


class StoredRow(NamedTuple):
    """A row as it is stored, and where."""

    shard: int
    number: int
    """In the shard, from 1."""
    value: Any


class _Place(NamedTuple):
    """Between two rows: the shards of the epoch before it, and the shard's rows and offset."""

    shard: int = 0
    number: int = 0
    offset: int = 0


class SetReader:
    """The rows of an epoch of one data set, from a state on."""

    def __init__(
        self, shards: Sequence[Shard], buffer: int, seed: int, epoch: int, state: State | None
    ) -> None:
        """``buffer`` is the number of rows in a window; 0: rows come as they are stored."""
        self._shards, self._buffer, self._seed = shards, buffer, (seed, epoch)
        self._order: Sequence[int] = range(len(shards))
        if buffer:
            self._order = self._draw(_SHARDS).permutation(len(shards)).tolist()
        state = state or {"row": 0, "place": _Place(), "taken": 0}
        self._first: int = state["row"]
        self._start = self._next = _Place(*state["place"])
        self._taken = 0
        self._window: list[StoredRow] = []
        self._rows = self._read(self._start)
        if state["taken"]:
            self._fill()
            self._taken = state["taken"]

    def _draw(self, *what: int) -> np.random.Generator:
        return np.random.default_rng((*self._seed, *what))

    def tell(self) -> State:
        """Where the next row is; ``__init__`` takes it."""
        return {"row": self._first, "place": list(self._start), "taken": self._taken}

    def take(self, count: int) -> list[StoredRow]:
        """The next rows, fewer at the end."""
        rows: list[StoredRow] = []
        while len(rows) < count:
            if self._taken == len(self._window) and not self._fill():
                break
            part = self._window[self._taken : self._taken + count - len(rows)]
            self._taken += len(part)
            rows += part
        return rows

    def _fill(self) -> bool:
        """Read the next window; False at the end."""
        self._first += len(self._window)
        self._start, self._taken, self._window = self._next, 0, []
        size, room = self._buffer or UNSHUFFLED_WINDOW, _WINDOW_BYTES
        if self._buffer and self._first == 0:  # otherwise the same rows would always be together
            size = int(self._draw(_FIRST).integers(1, size + 1))
        for row, after in self._rows:
            self._window.append(row)
            self._next = after
            room -= measure(row.value)
            if len(self._window) == size or room <= 0:
                break
        if self._buffer:
            order = self._draw(_ROWS, self._first).permutation(len(self._window))
            self._window = [self._window[place] for place in order]
        return bool(self._window)

    def _read(self, place: _Place) -> Iterator[tuple[StoredRow, _Place]]:
        for rank in range(place.shard, len(self._order)):
            number = self._order[rank]
            for row, offset in read_shard(self._shards, number, place.number, place.offset):
                yield row, _Place(rank, row.number, offset)
            place = _Place()


class EndlessReader:
    """The rows of a data set again and again, each time in another order."""

    def __init__(
        self, shards: Sequence[Shard], buffer: int, seed: int, state: State | None
    ) -> None:
        self._name, self._open = shards[0].name, partial(SetReader, shards, buffer, seed)
        state = state or {"pass": 0, "inner": None}
        self._pass: int = state["pass"]
        self._reader = self._open(self._pass, state["inner"])

    def tell(self) -> State:
        return {"pass": self._pass, "inner": self._reader.tell()}

    def take(self, count: int) -> list[StoredRow]:
        rows = self._reader.take(count)
        while len(rows) < count:
            self._pass += 1
            self._reader = self._open(self._pass, None)
            if not (more := self._reader.take(count - len(rows))):
                raise DataError(f"{self._name} holds no rows.")
            rows += more
        return rows


Reader = SetReader | EndlessReader


def read_shard(
    shards: Sequence[Shard], number: int, done: int = 0, offset: int = 0
) -> Iterator[tuple[StoredRow, int]]:
    """The rows of a shard, each with the offset after it; errors name file and row."""
    shard, last = shards[number], done
    try:
        for last, value, after in shard.read(done, offset):
            yield StoredRow(number, last, value), after
    except FileNotFoundError:
        raise DataError(f"{shard.name}: this shard of the stream is missing.") from None
    except RapidformerError as error:
        raise DataError(f"{shard.name}, row {last + 1}: {error}") from None
    except Exception as error:  # those of Arrow, tarfile and decompressors share no base class
        reason = get_first_line(error)
        raise DataError(f"{shard.name}, row {last + 1}: cannot be read: {reason}") from error


def measure(value: Any) -> int:
    """About the bytes of a stored row."""
    if isinstance(value, dict):
        return sum(map(measure, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(measure, value))
    return len(value) if isinstance(value, (str, bytes)) else 8
