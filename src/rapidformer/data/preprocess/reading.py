"""Cut the input into parts of about equal size, each a list of pieces of files.

Where a part ends depends only on where it began, so a run that resumes after a kill cuts the same
parts and merely skips the finished ones. A part may hold pieces of many small files; a document is
never cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rapidformer.data.preprocess.cursors import Cursor, open_cursor
from rapidformer.data.preprocess.inputs import Source


@dataclass(frozen=True)
class Piece:
    """A run of whole documents of one file.

    ``form`` is json or lines (one document per line), blank-line, file (one document) or objects.
    """

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


class PartReader:
    """Cuts part after part, starting where an earlier part ended."""

    def __init__(
        self,
        sources: list[Source],
        *,
        keys: tuple[str, ...],
        text_documents: str,
        part_bytes: int,
        max_documents: int | None,
        start: Position | None = None,
        first_number: int = 0,
    ) -> None:
        self._sources = sources
        self._sizes_before = list(accumulate((source.size for source in sources), initial=0))
        self._options: dict[str, Any] = {"keys": keys, "text_documents": text_documents}
        self._part_bytes = part_bytes
        self._max_documents = max_documents
        self._position = start or Position()
        self._number = first_number
        self._cursor: Cursor | None = None

    def __iter__(self) -> Iterator[Part]:
        try:
            while (part := self._cut()) is not None:
                yield part
        finally:
            if self._cursor is not None:
                self._cursor.close()

    def _cut(self) -> Part | None:
        pieces: list[Piece] = []
        begin = self._position
        while (filled := self._position.text_bytes - begin.text_bytes) < self._part_bytes:
            if self._position.source == len(self._sources) or self._count_left() == 0:
                break
            piece = self._read_piece(self._part_bytes - filled)
            if piece is not None:
                pieces.append(piece)
        if not pieces:
            return None
        part = Part(
            self._number, pieces, self._position, self._position.text_bytes - begin.text_bytes
        )
        self._number += 1
        return part

    def _count_left(self) -> int | None:
        if self._max_documents is None:
            return None
        return self._max_documents - self._position.documents

    def _read_piece(self, budget: int) -> Piece | None:
        """The next documents of the current file; None if it has no more."""
        at = self._position
        source = self._sources[at.source]
        if self._cursor is None:
            self._cursor = open_cursor(source, offset=at.offset, line=at.line, **self._options)
        read = self._cursor.read(budget, self._count_left())
        before = self._sizes_before[at.source]
        if not read.documents:
            self._cursor.close()
            self._cursor = None
            self._position = Position(
                at.source + 1, 0, 0, at.documents, at.text_bytes, before + source.size
            )
            return None
        self._position = Position(
            at.source,
            self._cursor.offset,
            self._cursor.line,
            at.documents + read.documents,
            at.text_bytes + read.text_bytes,
            before + self._cursor.get_disk_position(),
        )
        return Piece(at.source, self._cursor.form, at.line + 1, read.payload)
