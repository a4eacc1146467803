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
