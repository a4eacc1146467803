"""Cut the input into parts of about equal size, each a list of pieces of files.

Where a part ends depends only on where it began, so a run that resumes after a kill cuts the same
parts and merely skips the finished ones. A part may hold pieces of many small files; a document is
never cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import IO, Any

from rapidformer.data.preprocess.inputs import Source, explain_damage, open_decompressed
from rapidformer.errors import DataError, MissingPackageError
from rapidformer.strict_json import parse_json

_BLANK_LINES = re.compile(rb"\n[ \t\r]*\n\s*")
_ROW_BYTES = 64  # added per row, so that rows without text fill a part too
_ROWS_AT_ONCE = 1024
_SKIPPED_AT_ONCE = 1 << 20
Read = tuple[bytes | list[Any], int, int]
"""A payload, its number of documents (none at the end of the file) and bytes of text."""


@dataclass(frozen=True)
class Piece:
    """A run of whole documents of one file, by ``form``: json, lines, blank-line, file, objects."""

    source: int
    form: str
    first_line: int
    payload: bytes | list[Any]


@dataclass(frozen=True)
class Position:
    """A place between two documents: progress in the current file and in the whole input."""

    source: int = 0
    offset: int = 0  # bytes of text, or rows of a table
    line: int = 0
    documents: int = 0
    text_bytes: int = 0
    disk_bytes: int = 0  # of all files, before decompression: used to estimate the time left


@dataclass(frozen=True)
class Part:
    """What one worker turns into one pair of files per key."""

    number: int
    pieces: list[Piece]
    end: Position
    text_bytes: int


def read_parts(
    sources: list[Source],
    *,
    keys: tuple[str, ...],
    text_documents: str,
    part_bytes: int,
    max_documents: int | None,
    start: Position | None = None,
    number: int = 0,
) -> Iterator[Part]:
    """Part after part, from where an earlier part ended; ``number`` is the first one's."""
    sizes_before = list(accumulate((source.size for source in sources), initial=0))
    pieces: list[Piece] = []
    begin = at = start or Position()
    cursor: Cursor | None = None
    try:
        while at.source < len(sources) and at.documents != max_documents:
            cursor = cursor or open_cursor(
                sources[at.source], at.offset, at.line, keys, text_documents
            )
            budget = part_bytes - (at.text_bytes - begin.text_bytes)
            left = None if max_documents is None else max_documents - at.documents
            payload, documents, text_bytes = cursor.read(budget, left)
            documents, text_bytes = at.documents + documents, at.text_bytes + text_bytes
            if documents == at.documents:
                cursor.close()
                cursor = None
                disk_bytes = sizes_before[at.source + 1]
                at = Position(at.source + 1, 0, 0, documents, text_bytes, disk_bytes)
                continue
            pieces.append(Piece(at.source, cursor.form, at.line + 1, payload))
            disk_bytes = sizes_before[at.source] + cursor.get_disk_position()
            at = Position(at.source, cursor.offset, cursor.line, documents, text_bytes, disk_bytes)
            if text_bytes - begin.text_bytes >= part_bytes:
                yield Part(number, pieces, at, text_bytes - begin.text_bytes)
                pieces, begin, number = [], at, number + 1
        if pieces:
            yield Part(number, pieces, at, at.text_bytes - begin.text_bytes)
    finally:
        if cursor is not None:
            cursor.close()


# --- files ---------------------------------------------------------------------------------------
# A cursor reads one file from a given place, a run of whole documents at a time. `read` may return
# more than it was asked for, because a document is never cut, and its result must depend only on
# where it starts: `read_parts` relies on that.


class LineCursor:
    """One document per line; only a newline ends a line. ``form`` says how to parse a payload."""

    def __init__(self, source: Source, form: str, offset: int, line: int) -> None:
        self.form, self.offset, self.line = form, offset, line
        self._path = source.path
        self._raw = source.path.open("rb")
        self._file: IO[bytes] = open_decompressed(self._raw, source.compression)
        if source.compression is None:
            self._file.seek(offset)
        else:
            with explain_damage(self._path):
                while offset > 0:
                    offset -= len(self._file.read(min(offset, _SKIPPED_AT_ONCE))) or offset

    def read(self, budget: int, max_documents: int | None) -> Read:
        """Whole documents of about ``budget`` bytes; at least one unless the file ends here."""
        with explain_damage(self._path):
            payload = self._read_whole(budget)
        documents = self._count(payload)
        if max_documents is not None and documents > max_documents:
            payload = self._take_first(payload, max_documents)
            documents = max_documents
        self.offset += len(payload)
        self.line += payload.count(b"\n")
        return payload, documents, len(payload)

    def get_disk_position(self) -> int:
        """Bytes of the file on disk before this place."""
        return self._raw.tell()

    def close(self) -> None:
        self._raw.close()

    def _read_whole(self, budget: int) -> bytes:
        payload = self._file.read(budget)
        if payload and not payload.endswith(b"\n"):
            payload += self._file.readline()
        return payload

    def _count(self, payload: bytes) -> int:
        return payload.count(b"\n") + (bool(payload) and not payload.endswith(b"\n"))

    def _take_first(self, payload: bytes, count: int) -> bytes:
        return b"".join(line + b"\n" for line in payload.split(b"\n", count)[:count])


class ParagraphCursor(LineCursor):
    """Documents separated by blank lines."""

    def _read_whole(self, budget: int) -> bytes:
        # Past the budget, on to the next blank line; text between documents goes to the first.
        pieces = [super()._read_whole(budget)]
        while line := self._file.readline():
            pieces.append(line)
            if not line.strip():
                break
        return b"".join(pieces)

    def _count(self, payload: bytes) -> int:
        return len(split_paragraphs(payload))

    def _take_first(self, payload: bytes, count: int) -> bytes:
        return b"\n\n".join(text for _, text in split_paragraphs(payload)[:count])


class FileCursor(LineCursor):
    """The whole file is one document."""

    def _read_whole(self, budget: int) -> bytes:
        return self._file.read()

    def _count(self, payload: bytes) -> int:
        return int(bool(payload))


class ObjectCursor:
    """Rows of a table or items of a JSON list: already objects, numbered from 1 like lines."""

    form = "objects"

    def __init__(self, source: Source, offset: int, keys: tuple[str, ...]) -> None:
        self.offset = self.line = offset
        self._source = source
        with explain_damage(source.path):
            if source.kind == "parquet":
                self._total, self._objects = _open_table(source, offset, keys)
            else:
                items = _load_array(source)
                self._total, self._objects = len(items), iter(items[offset:])

    def read(self, budget: int, max_documents: int | None) -> Read:
        objects: list[Any] = []
        size = 0
        with explain_damage(self._source.path):
            for item in self._objects:
                objects.append(item)
                size += _measure(item)
                if size >= budget or len(objects) == max_documents:
                    break
        self.offset = self.line = self.offset + len(objects)
        return objects, len(objects), size

    def get_disk_position(self) -> int:
        return self._source.size * self.offset // max(self._total, 1)

    def close(self) -> None:
        """What is in memory needs no closing."""


Cursor = LineCursor | ObjectCursor


def open_cursor(
    source: Source, offset: int, line: int, keys: tuple[str, ...], text_documents: str
) -> Cursor:
    """The reader for this kind of file, moved to where an earlier part ended."""
    if source.kind in ("parquet", "json-array"):
        return ObjectCursor(source, offset, keys)
    form = "json" if source.kind == "json" else text_documents
    kind = {"file": FileCursor, "blank-line": ParagraphCursor}.get(form, LineCursor)
    return kind(source, form, offset, line)


def split_paragraphs(payload: bytes) -> list[tuple[int, bytes]]:
    """The documents between blank lines, each with the number of lines before it."""
    documents: list[tuple[int, bytes]] = []
    line = at = 0
    for gap in [*_BLANK_LINES.finditer(payload), None]:
        text = payload[at : gap.start() if gap else len(payload)]
        if text.strip():
            documents.append((line, text))
        if gap:
            line += payload.count(b"\n", at, gap.end())
            at = gap.end()
    return documents


def _measure(item: Any) -> int:
    values = item.values() if isinstance(item, dict) else [item]
    return _ROW_BYTES + sum(len(value) for value in values if isinstance(value, (str, list)))


def _load_array(source: Source) -> list[Any]:
    with source.path.open("rb") as raw:
        content = open_decompressed(raw, source.compression).read()
    try:
        items: list[Any] = parse_json(content.removeprefix(b"\xef\xbb\xbf"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{source.path}, line {error.lineno}: the file begins like a JSON list ([), but is "
            f"none ({error.msg}, column {error.colno}). One JSON object per line works too."
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{source.path} is not UTF-8 text (byte {error.start}).") from None
    except ValueError as error:
        raise DataError(f"{source.path}: not valid JSON ({error}).") from None
    return items


def _open_table(source: Source, offset: int, keys: tuple[str, ...]) -> tuple[int, Iterator[Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingPackageError("pyarrow", f"Reading {source.path}") from None
    table = parquet.ParquetFile(source.path)
    missing = [key for key in keys if key not in table.schema_arrow.names]
    if missing:
        raise DataError(
            f"{source.path} has no column {', '.join(missing)}: it has "
            f"{', '.join(table.schema_arrow.names)}. Choose with --json-keys."
        )
    return table.metadata.num_rows, _iterate_rows(table, offset, list(keys))


def _iterate_rows(table: Any, offset: int, columns: list[str]) -> Iterator[Any]:
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if rows <= offset:
            offset -= rows
            continue
        for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns):
            yield from batch.slice(min(offset, len(batch))).to_pylist()
            offset -= min(offset, len(batch))
