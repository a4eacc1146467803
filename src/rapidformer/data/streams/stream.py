"""The rows of a stream: read in the loader's process, decoded and encoded where they are used.

A stream has *steps*, the functions with which a task turns rows into samples. As long as a row is
one sample, the ranks share out stored rows, and each encodes its own, in its workers. Where a row
may become none or several (texts cut into blocks, examples left out), chunks of rows are encoded
before they are shared out, in the workers of every rank.

Nothing can be known of all rows. What a task has to know (columns, labels) it reads from the
stream's *head*, its first rows; a later row that does not fit is an error with file and number.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.data.streams.left_out import LeftOut
from rapidformer.data.streams.reader import (
    EndlessReader,
    Reader,
    SetReader,
    State,
    StoredRow,
    measure,
    read_shard,
)
from rapidformer.data.streams.shards import IterableShard, Row, Shard
from rapidformer.errors import DataError, RapidformerError
from rapidformer.log import get_logger

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

Step = Callable[[list[Any], list[Any]], list[Any]]
"""Rows, and their numbers in their shards from 0 (``RowNumber``), to samples."""
CHUNK = 1000
"""Rows that are encoded together, as in a table."""
_HEAD_ROWS = 1000
_HEAD_BYTES = 16 * 2**20


class RowNumber(int):
    """The number of a row in its shard, from 0, and the shard's name: for files, the path."""

    shard: str

    def __new__(cls, number: int, shard: str = "") -> RowNumber:
        self = super().__new__(cls, number)
        self.shard = shard
        return self

    def describe(self) -> str:
        return f"{self.shard}, row {self + 1}"


class StreamRows:
    """Data without a length, as a task and the loader see it."""

    size: int | None = None

    def __init__(self, shards: Sequence[Shard], *, buffer: int = 0) -> None:
        """``buffer`` is the number of rows that are shuffled together; 0: unshuffled."""
        self.shards, self._buffer = shards, buffer
        self._steps: tuple[Step, ...] = ()
        self.is_expanded = False
        """Whether a row may have become none or several samples."""
        self.is_shuffled = buffer > 0
        self._reported: set[str] = set()
        """Why rows were left out so far."""
        count = len(self.shards)
        self.name = self.shards[0].name if count == 1 else f"{count} shards"

    @cached_property
    def fingerprint(self) -> str | None:
        """Of what decides the order of rows, besides the seed."""
        text = repr(([(Path(s.name).name, s.size) for s in self.shards], self._buffer))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # ---- what a task does with it ---------------------------------------------------------------

    def then(self, step: Step, *, expands: bool) -> StreamRows:
        """The stream with one more step, which ``expands`` unless each row becomes one sample."""
        stream = copy.copy(self)
        stream.__dict__.pop("head", None)
        stream._steps = (*self._steps, step)
        stream.is_expanded = self.is_expanded or expands
        return stream

    def without_decoding(self, kind: str) -> StreamRows:
        """The stream with the columns of a kind (Audio) as they are stored."""
        stream = copy.copy(self)
        for name in ("head", "_stored_head", "_examples", "features"):
            stream.__dict__.pop(name, None)
        stream.shards = [
            shard.without_decoding(kind) if isinstance(shard, IterableShard) else shard
            for shard in self.shards
        ]
        return stream

    def map(self, function: Callable[[Any], Any]) -> StreamRows:
        """The stream with a function of each row, called by the process that uses the row."""
        return self.map_numbered(lambda row, _: function(row))

    def map_numbered(self, function: Callable[[Any, RowNumber], Any]) -> StreamRows:
        """The same with a function of each row and its number in its shard, from 0."""
        return self.then(lambda *rows: list(map(function, *rows)), expands=False)

    @cached_property
    def head(self) -> list[Any]:
        """The first rows, or what the steps make of them."""
        return self.encode(self._stored_head)

    def peek(self, count: int) -> list[Any]:
        """The first samples. Where each row is one, no more are made: pictures are large."""
        if self.is_expanded:
            return self.head[:count]
        return self.encode(self._stored_head[:count])

    @cached_property
    def _stored_head(self) -> list[StoredRow]:
        rows: list[StoredRow] = []
        room = _HEAD_BYTES
        stored = (row for n in range(len(self.shards)) for row, _ in read_shard(self.shards, n))
        for row in islice(stored, _HEAD_ROWS):
            rows.append(row)
            room -= measure(row.value)
            if room <= 0:
                break
        if not rows:
            raise DataError(f"{self.name}: the stream holds no rows.")
        return rows

    @cached_property
    def features(self) -> Mapping[str, Any]:
        """What the first shard declares of its columns."""
        return self.shards[0].features

    @cached_property
    def _examples(self) -> dict[str, Any]:
        """A value of each column of the head, which tells the type that it must hold."""
        examples: dict[str, Any] = {}
        for stored in self._stored_head:
            for name, value in self._decode(stored).items():
                if value is not None:
                    examples.setdefault(name, value)
        return examples

    # ---- rows to samples ------------------------------------------------------------------------

    def encode(self, stored: Sequence[StoredRow]) -> list[Any]:
        """The samples of these rows; an error names the file and the row."""
        rows = [self._check_types(self._decode(row), row) for row in stored]
        try:
            samples = self._run_steps(rows, [self._number(row) for row in stored])
        except Exception:  # a step may be the user's own function
            self._find_fault(stored, rows)
            raise
        if not self.is_expanded:
            self._report(stored, samples)
        return samples

    def _report(self, stored: Sequence[StoredRow], samples: Sequence[Any]) -> None:
        """Warn of the first row that was left out for a reason."""
        for place, sample in zip(stored, samples, strict=True):
            if isinstance(sample, LeftOut) and sample.reason not in self._reported:
                self._reported.add(sample.reason)
                get_logger().warning(
                    f"{self._locate(place)}: nothing is learnt from this row: {sample.reason}."
                )

    def _run_steps(self, rows: list[Any], numbers: list[RowNumber]) -> list[Any]:
        for step in self._steps:
            rows = step(rows, numbers)
        return rows

    def _find_fault(self, stored: Sequence[StoredRow], rows: list[Row]) -> None:
        """Raise an error if one of the rows cannot be encoded alone."""
        for place, row in zip(stored, rows, strict=True):
            try:
                self._run_steps([row], [self._number(place)])
            except RapidformerError as error:
                text = re.sub(r"^\w+, row \d+(, |: )?", "", str(error))
                raise type(error)(f"{self._locate(place)}: {text}") from None
            except Exception as error:
                raise DataError(
                    f"{self._locate(place)}: the row cannot be used: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _number(self, row: StoredRow) -> RowNumber:
        return RowNumber(row.number - 1, self.shards[row.shard].name)

    def _locate(self, row: StoredRow) -> str:
        return self._number(row).describe()

    def _decode(self, stored: StoredRow) -> Row:
        try:
            return self.shards[stored.shard].decode(stored.value)
        except RapidformerError as error:
            raise DataError(f"{self._locate(stored)}: {error}") from None

    def _check_types(self, row: Row, stored: StoredRow) -> Row:
        """The row, if its columns hold what those of the head do."""
        for name, value in row.items():
            known = self._examples.get(name)
            if known is None or value is None or type(value) is type(known):
                continue
            if not (isinstance(value, (int, float)) and isinstance(known, (int, float))):
                raise DataError(
                    f"{self._locate(stored)}: the column {name} holds {str(value)[:60]!r} "
                    f"({type(value).__name__}), but {str(known)[:60]!r} ({type(known).__name__}) "
                    "before: a column must hold one type."
                )
        return row

    # ---- what the loader does with it -----------------------------------------------------------

    def get_rows(self, numbers: Sequence[Any]) -> list[Any]:
        """The samples of what was shared out: pairs of a number and a stored row, or a sample."""
        taken = [sample for _, sample in numbers]
        if not isinstance(taken[0], StoredRow):
            return taken
        samples = self.encode(taken)
        assert len(samples) == len(taken), "a step that expands was declared one to one"
        return samples

    def find_set(self, number: int) -> str:
        return self.name

    def read(
        self, seed: int, epoch: int, position: int, *, cursor: State | None = None,
        num_workers: int = 0, encodes: bool = False, repeats: bool = False,
    ) -> Reading:  # fmt: skip
        """Read a pass from after this many samples, near which a ``cursor`` of ``Reading`` is.

        ``encodes``: give samples, not stored rows. ``repeats``: read pass after pass.
        """
        _ = self._examples  # before workers are forked: each of them would read the head
        if cursor is None or cursor["data"] != self.fingerprint or cursor["samples"] > position:
            cursor = {"samples": 0, "state": None}
        reader: Reader
        if repeats:
            reader = EndlessReader(self.shards, self._buffer, seed, cursor["state"])
        else:
            reader = SetReader(self.shards, self._buffer, seed, epoch, cursor["state"])
        workers = num_workers if self.is_expanded or encodes else None
        reading = Reading(self, reader, cursor["samples"], workers)
        reading.skip(position - cursor["samples"])
        return reading

    def __iter__(self) -> Iterator[Any]:
        """All samples in order, for those who read the stream themselves."""
        reading = self.read(0, 0, 0)
        while taken := reading(CHUNK):
            yield from self.get_rows(list(enumerate(taken)))


class Reading:
    """A pass over a stream: called with a number, it takes the next samples."""

    def __init__(
        self, stream: StreamRows, reader: Reader, samples: int, num_workers: int | None
    ) -> None:
        """``num_workers`` encode rows before they are taken; None: stored rows are taken."""
        self._stream, self._reader = stream, reader
        self._samples = samples
        """Samples of the pass before the next one that is read."""
        self._states: deque[State] = deque()
        """Where the chunks begin that are being encoded."""
        self._marks: deque[tuple[int, State]] = deque([(samples, reader.tell())])
        """Numbers of samples, and where the reader was before them."""
        self._encoded = None if num_workers is None else self._encode(num_workers)
        self._ready: list[Any] = []

    def __call__(self, count: int) -> list[Any]:
        if self._encoded is None:
            self._marks.append((self._samples, self._reader.tell()))
            rows: list[Any] = self._reader.take(count)
            self._samples += len(rows)
            return rows
        while len(self._ready) < count:
            chunk = next(self._encoded, None)
            if chunk is None:
                break
            self._marks.append((self._samples, self._states.popleft()))
            self._samples += len(chunk)
            self._ready += chunk
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def skip(self, count: int) -> None:
        """Leave out samples."""
        while count > 0 and (taken := self(min(count, CHUNK))):
            count -= len(taken)

    def locate(self, position: int) -> State:
        """From where to read again to get the sample after this many; forgets what is before."""
        while len(self._marks) > 1 and self._marks[1][0] <= position:
            self._marks.popleft()
        samples, state = self._marks[0]
        return {"samples": samples, "data": self._stream.fingerprint, "state": state}

    def close(self) -> None:
        """End the workers of a pass that was left before its end.

        The garbage collector would do it at some later time, when the queues that tell the workers
        are gone already: it would wait five seconds for each of them.
        """
        if self._encoded is not None:
            self._encoded.close()

    def _encode(self, num_workers: int) -> Generator[list[Any], None, None]:
        chunks = build_worker_loader(
            _Encoder(self._stream), self._read_chunks(), num_workers, forks=True
        )
        for chunk in chunks:
            if isinstance(chunk, RapidformerError):
                raise chunk
            yield chunk

    def _read_chunks(self) -> Iterator[list[StoredRow]]:
        while True:
            state = self._reader.tell()
            rows = self._reader.take(CHUNK)
            if not rows:
                return
            self._states.append(state)
            yield rows


class _Encoder:
    def __init__(self, stream: StreamRows) -> None:
        self._stream = stream

    def __getitem__(self, rows: list[StoredRow]) -> list[Any] | RapidformerError:
        try:
            return self._stream.encode(rows)
        except RapidformerError as error:
            # Handed over as it is: raised in a worker, it would come with the worker's traceback.
            return error


def build_worker_loader(
    dataset: Any, keys: Iterator[Any], num_workers: int, *, forks: bool, **options: Any
) -> DataLoader[Any]:
    """What ``dataset`` makes of each key, in order, by processes that get the key alone.

    ``forks``: it has functions of tasks, which cannot be sent to a process that is started anew.
    """
    from torch.utils.data import DataLoader

    if forks and "fork" not in get_all_start_methods():
        num_workers, options["prefetch_factor"] = 0, None
    return DataLoader(
        dataset, batch_size=None, sampler=keys, collate_fn=_pass_on, num_workers=num_workers,
        multiprocessing_context="fork" if forks and num_workers else None,
        worker_init_fn=_keep_quiet, **options,
    )  # fmt: skip


def _pass_on(value: Any) -> Any:
    return value


def _keep_quiet(_: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # without it, each would warn
