"""From a piece of a file to the texts of its documents; what cannot be used is logged.

A record that lacks one of several keys is skipped for all of them, so that the keys' files keep
describing the same documents. A list of strings is a document that is already split into sentences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from rapidformer.data.preprocess.parts import ProblemLog
from rapidformer.data.preprocess.reading import Piece, split_paragraphs
from rapidformer.strict_json import describe_fault, parse_json

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN = 60
_MISSING = object()


class Record(NamedTuple):
    """One document: its position, and for each key its text or its sentences."""

    source: int
    line: int
    texts: list[str | list[str]]


def iterate_records(piece: Piece, keys: tuple[str, ...], log: ProblemLog) -> Iterator[Record]:
    """The documents of a piece, with their line numbers."""
    if piece.form == "objects":
        for number, item in enumerate(piece.payload, start=piece.first_line):
            picked = _pick(item, keys, piece, number, log)
            if picked is not None:
                yield Record(piece.source, number, picked)
        return
    payload = piece.payload
    assert isinstance(payload, bytes)
    if piece.first_line == 1:
        payload = payload.removeprefix(_BYTE_ORDER_MARK)
    for number, raw in _split(piece, payload):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            log.add("not UTF-8", piece.source, number, f"byte {error.start} of the line")
            continue
        texts: list[str | list[str]] | None = [text]
        if piece.form == "json":
            # A blank line is a document without text, and counts as one.
            item = _parse(text, piece, number, log) if text.strip() else dict.fromkeys(keys, "")
            texts = None if item is _MISSING else _pick(item, keys, piece, number, log)
        if texts is not None:
            yield Record(piece.source, number, texts)


def _split(piece: Piece, payload: bytes) -> Iterator[tuple[int, bytes]]:
    first = piece.first_line
    if piece.form == "file":
        yield first, payload
    elif piece.form == "blank-line":
        for line, text in split_paragraphs(payload):
            yield first + line, text
    else:
        lines = payload.split(b"\n")
        if not lines[-1]:
            lines.pop()
        for number, content in enumerate(lines, start=first):
            yield number, content.removesuffix(b"\r") if piece.form == "lines" else content


def _parse(text: str, piece: Piece, number: int, log: ProblemLog) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        detail = f"{describe_fault(error)}: {text[:_SHOWN]}"
        log.add("not valid JSON", piece.source, number, detail)
    return _MISSING


def _pick(
    item: Any, keys: tuple[str, ...], piece: Piece, number: int, log: ProblemLog
) -> list[str | list[str]] | None:
    if not isinstance(item, dict):
        log.add("not a JSON object", piece.source, number, json.dumps(item)[:_SHOWN])
        return None
    texts: list[str | list[str]] = []
    for key in keys:
        value = item.get(key, _MISSING)
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if type(value) is str or is_list:
            texts.append(value)
        elif value is _MISSING:
            has = ", ".join(map(str, item)) or "none"
            log.add(f"no key {key!r}", piece.source, number, f"its keys: {has[:_SHOWN]}")
            return None
        else:
            detail = f"{type(value).__name__}: {str(value)[:_SHOWN]}"
            log.add(f"{key!r} is not a string", piece.source, number, detail)
            return None
    return texts
