"""Shards: files (or parts of a data set on the Hub) that are read row by row, from any row on.

A shard yields undecoded rows: every rank reads all of them, and decodes its own alone. With each
comes its number in the file, from 1, and the offset at which the row after it begins. Both are
given back to go on from there. What cannot be sought in (compressed files) is read and dropped.
"""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from rapidformer.data.files import get_format, get_table_dialect, import_datasets, without_decoding
from rapidformer.data.preprocess.inputs import open_decompressed
from rapidformer.errors import DataError
from rapidformer.strict_json import describe_fault, parse_json

Row = dict[str, Any]
Item = tuple[int, Any, int]
"""The number of a row in its shard, the row as it is stored, and the offset of the next one."""
_RETURN = re.compile(rb"(?<=\r)(?!\n)")
COMPRESSED = (".gz", ".zst")
_SLICE = 1000
"""Rows of a column format that become Python objects at a time."""
_TYPED_ROWS = 1000
"""Rows of a table of text that tell what its columns hold."""


class Shard(Protocol):
    """A part of a stream."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None:
        """Bytes, if known: another size is another shard."""

    @property
    def features(self) -> Mapping[str, Any]:
        """What the shard declares of its columns, such as the names of classes."""

    def read(self, done: int, offset: int) -> Iterator[Item]:
        """The rows after the first ``done``, of which the next begins at ``offset``."""

    def decode(self, stored: Any) -> Row:
        """A row as tasks see it; an error says what is wrong with it, not where it is."""


@dataclass(frozen=True)
class FileShard:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int | None:
        return self.path.stat().st_size if self.path.exists() else None

    @property
    def features(self) -> Mapping[str, Any]:
        return {}

    @property
    def can_seek(self) -> bool:
        return self.path.suffix.lower() not in COMPRESSED

    def start(self, done: int, offset: int) -> tuple[int, int]:
        """Where reading begins."""
        return (done, offset) if self.can_seek else (0, 0)


@dataclass(frozen=True)
class LineShard(FileShard):
    """A row per line: JSON objects, or plain text."""

    def read(self, done: int, offset: int) -> Iterator[Item]:
        number, offset = self.start(done, offset)
        with open_file(self.path) as file:
            if offset:
                file.seek(offset)
            for line in self._split(file):
                number += 1
                offset += len(line)
                if number > done and line.strip():
                    yield number, line, offset

    def _split(self, lines: Iterable[bytes]) -> Iterable[bytes]:
        """In plain text, a lone carriage return ends a line as well, as in a table of lines."""
        if get_format(drop_compression(self.path)) != "text":
            return lines
        return (part for line in lines for part in _RETURN.split(line) if part)

    def decode(self, stored: Any) -> Row:
        text = _to_text(stored).rstrip("\r\n")
        if get_format(drop_compression(self.path)) == "text":
            return {"text": text}
        text = text.strip()
        try:
            row = parse_json(text)
        except ValueError as error:
            raise DataError(f"not valid JSON ({describe_fault(error)}): {text[:60]}") from None
        if isinstance(row, str):
            return {"text": row}
        if not isinstance(row, dict):
            raise DataError(
                f"each line must be a JSON object, but this is {text[:60]}. A file that is one "
                "JSON list cannot be read as a stream: write one object per line (.jsonl)."
            )
        return row


@dataclass(frozen=True)
class TableShard(FileShard):
    """A table of text, csv or tsv; ``kinds`` is what its columns hold."""

    kinds: Mapping[str, type] = field(default_factory=dict)

    def read(self, done: int, offset: int) -> Iterator[Item]:
        number, start = self.start(done, offset)
        with open_file(self.path) as file:
            position = 0

            def lines() -> Iterator[str]:
                nonlocal position
                for line in file:
                    position += len(line)
                    yield _to_text(line)

            dialect = get_table_dialect(drop_compression(self.path))
            header = _name_columns(next(csv.reader(lines(), **dialect), []))
            if start:
                file.seek(start)
                position = start
            for cells in csv.reader(lines(), **dialect):
                if cells:
                    number += 1
                    if number > done:
                        yield number, (header, cells), position

    def decode(self, stored: Any) -> Row:
        header, cells = stored
        if len(header) != len(cells):
            raise DataError(f"{len(cells)} cells for {len(header)} columns.")
        return {name: self._read(name, cell) for name, cell in zip(header, cells, strict=True)}

    def _read(self, name: str, cell: str) -> Any:
        kind = self.kinds.get(name, str)
        if cell == "":
            return None
        try:
            return cell.lower() == "true" if kind is bool else kind(cell)
        except ValueError:
            raise DataError(
                f"the column {name} holds {cell!r}, but {kind.__name__} before: a column must hold "
                "one type."
            ) from None

    def find_kinds(self) -> dict[str, type]:
        """What the columns hold, by the first rows."""
        rows = [stored for _, stored, _ in islice(self.read(0, 0), _TYPED_ROWS)]
        header = rows[0][0] if rows else []
        columns = zip(*(cells for _, cells in rows if len(cells) == len(header)), strict=True)
        return {name: _find_kind(cells) for name, cells in zip(header, columns, strict=True)}


def _name_columns(header: Sequence[str]) -> list[str]:
    """As in pandas: a column without a name is ``Unnamed: 0``, a second ``text`` ``text.1``."""
    header = [name or f"Unnamed: {place}" for place, name in enumerate(header)]
    counts = [header[:place].count(name) for place, name in enumerate(header)]
    return [f"{name}.{n}" if n else name for name, n in zip(header, counts, strict=True)]


def _find_kind(cells: Sequence[str]) -> type:
    """What pandas would take the cells for: numbers may have blanks around them."""
    filled = [cell for cell in cells if cell]
    patterns = {
        int: r"\s*[+-]?\d+\s*", float: r"\s*[+-]?(\d+\.?\d*|\.\d+|inf)([eE][+-]?\d+)?\s*",
        bool: r"(?i:true|false)",
    }  # fmt: skip
    matches = (k for k, p in patterns.items() if all(re.fullmatch(p, cell) for cell in filled))
    return next(matches, str) if filled else str


@dataclass(frozen=True)
class ColumnShard(FileShard):
    """Parquet, sought by row group, or Arrow, by record batch."""

    @property
    def features(self) -> Mapping[str, Any]:
        return import_datasets().Features.from_arrow_schema(self._schema)

    @property
    def _schema(self) -> Any:
        import pyarrow

        if self.path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_schema(self.path)
        with pyarrow.memory_map(str(self.path)) as file:
            return _open_arrow(file).schema

    def read(self, done: int, offset: int) -> Iterator[Item]:
        is_parquet = self.path.suffix == ".parquet"
        first, batches = self._read_parquet(done) if is_parquet else (0, self._read_arrow())
        for batch in batches:
            skipped = min(max(done - first, 0), batch.num_rows)
            for start in range(skipped, batch.num_rows, _SLICE):
                rows = batch.slice(start, _SLICE).to_pylist()
                for number, row in enumerate(rows, first + start + 1):
                    yield number, row, 0
            first += batch.num_rows

    def _read_parquet(self, done: int) -> tuple[int, Iterator[Any]]:
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(self.path)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        group, first = 0, 0
        while group < len(sizes) and first + sizes[group] <= done:
            first += sizes[group]
            group += 1
        return first, file.iter_batches(_SLICE, row_groups=list(range(group, len(sizes))))

    def _read_arrow(self) -> Iterator[Any]:
        import pyarrow

        # Mapped: the batches that are passed over are not read.
        with pyarrow.memory_map(str(self.path)) as file:
            reader = _open_arrow(file)
            if hasattr(reader, "num_record_batches"):
                yield from map(reader.get_batch, range(reader.num_record_batches))
            else:
                yield from reader

    def decode(self, stored: Any) -> Row:
        return dict(stored)


def _open_arrow(file: Any) -> Any:
    """Arrow's file layout, or its stream layout, which `datasets` writes."""
    import pyarrow

    try:
        return pyarrow.ipc.open_file(file)
    except pyarrow.ArrowInvalid:
        file.seek(0)
        return pyarrow.ipc.open_stream(file)


@dataclass(frozen=True)
class IterableShard:
    """A shard of a data set that can only be read from its start."""

    dataset: Any
    name: str
    size: int | None = None

    @property
    def features(self) -> Mapping[str, Any]:
        return getattr(self.dataset, "features", None) or {}

    def without_decoding(self, kind: str) -> IterableShard:
        """The same with the columns of a kind (Audio) as they are stored."""
        return replace(self, dataset=without_decoding(self.dataset, kind, *self.features))

    def read(self, done: int, offset: int) -> Iterator[Item]:
        for number, row in enumerate(islice(iter(self.dataset), done, None), done + 1):
            yield number, row, 0

    def decode(self, stored: Any) -> Row:
        if isinstance(stored, str):
            return {"text": stored}
        if not isinstance(stored, Mapping):
            raise DataError(f"a row must be a dictionary, not a {type(stored).__name__}.")
        return dict(stored)


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed while they are read."""
    packing = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    with path.open("rb") as raw:
        yield open_decompressed(raw, packing)


def drop_compression(path: Path) -> Path:
    """The name of a file without the ending of its compression."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED else path


def _to_text(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")  # spreadsheets write a byte-order mark
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text ({error.reason} at byte {error.start}).") from None
