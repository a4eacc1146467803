"""Turn one part of the input into one pair of files per key, with a report.

The report is published last, so a part without one does not exist. Files are created under the
process's own names: a worker that briefly outlives a killed run and its successor may work on the
same part, and either may publish it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rapidformer.data.indexed import IndexedWriter
from rapidformer.data.preprocess.parts import (
    KeyCounts,
    PartReport,
    ProblemLog,
    compute_checksum,
    get_part_prefix,
    get_report_path,
)
from rapidformer.data.preprocess.reading import Part, Piece, split_paragraphs
from rapidformer.data.preprocess.sentences import build_splitter
from rapidformer.data.preprocess.settings import PreprocessSettings
from rapidformer.data.tokenizers import Tokenizer
from rapidformer.errors import DataError
from rapidformer.strict_json import describe_fault, parse_json

_BATCH_CHARACTERS = 1 << 19


class PartEncoder:
    """Tokenizes parts, one after another, into a folder."""

    def __init__(
        self, tokenizer: Tokenizer, settings: PreprocessSettings, folder: Path, dtype: str
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._folder = folder
        self._dtype = np.dtype(dtype)
        self._end = [tokenizer.eod] if settings.append_eod else []
        self._split = None
        if settings.split_sentences:
            self._split = build_splitter(settings.lang, keep_newlines=settings.keep_newlines)

    def encode(self, part: Part) -> PartReport:
        """Write a part's files and report; under --strict, a bad line leaves a report only."""
        keys = self._settings.json_keys
        counts = [KeyCounts() for _ in keys]
        report = PartReport(part.number, part.end, part.text_bytes, counts, ProblemLog())
        prefixes = [self._folder / f"{os.getpid()}-{part.number}-{i}" for i in range(len(keys))]
        with ExitStack() as stack:
            writers = [IndexedWriter(prefix, self._dtype, fsync=False) for prefix in prefixes]
            for writer in writers:
                stack.callback(writer.discard)  # does nothing once the writer is finalized
            self._encode_pieces(part, writers, report)
            if report.is_stopped:
                return report
            for writer in writers:
                writer.finalize()
        self._publish(prefixes, report)
        return report

    def _encode_pieces(self, part: Part, writers: list[IndexedWriter], report: PartReport) -> None:
        records: list[Record] = []
        size = 0
        for piece in part.pieces:
            for record in iterate_records(piece, self._settings.json_keys, report.problems):
                records.append(record)
                size += sum(map(len, record.texts))
                if size >= _BATCH_CHARACTERS:
                    self._write(records, writers, report)
                    records, size = [], 0
            if self._settings.strict and report.problems.count:
                break
        self._write(records, writers, report)
        report.is_stopped = self._settings.strict and report.problems.count > 0

    def _write(
        self, records: list[Record], writers: list[IndexedWriter], report: PartReport
    ) -> None:
        tokenized = self._tokenize(records, report.problems)
        for index, writer in enumerate(writers):
            chunks: list[list[int]] = []
            per_document: list[int] = []
            for document in tokenized:
                sentences = [ids for ids in document[index] if ids]
                if not sentences:
                    continue
                sentences[-1] += self._end
                chunks += sentences
                per_document.append(len(sentences))
            sizes = np.fromiter(map(len, chunks), np.int64, len(chunks))
            total = int(sizes.sum())
            flat = np.fromiter(chain.from_iterable(chunks), self._dtype, total)
            writer.add_batch(flat, sizes, np.array(per_document, np.int64))
            empty = len(tokenized) - len(per_document)
            report.counts[index].add(KeyCounts(len(per_document), len(chunks), total, empty))

    def _tokenize(self, records: list[Record], log: ProblemLog) -> list[list[list[list[int]]]]:
        """For each record and key, the ids of its sentences; what cannot be tokenized is logged."""
        try:
            return self._tokenize_good(records)
        except (TypeError, UnicodeError, DataError):
            # One text spoils the batch, and the library does not say which.
            good = [record for record in records if self._is_good(record, log)]
            if len(good) == len(records):
                raise
            return self._tokenize_good(good)

    def _tokenize_good(self, records: list[Record]) -> list[list[list[list[int]]]]:
        sentences = [[self._get_sentences(text) for text in record.texts] for record in records]
        flat = list(chain.from_iterable(chain.from_iterable(sentences)))
        ids = iter(self._tokenizer.tokenize_batch(flat))
        return [[[next(ids) for _ in of_key] for of_key in document] for document in sentences]

    def _get_sentences(self, text: str | list[str]) -> list[str]:
        if isinstance(text, list):
            return text
        return [text] if self._split is None else self._split(text)

    def _is_good(self, record: Record, log: ProblemLog) -> bool:
        try:
            for text in chain.from_iterable(map(self._get_sentences, record.texts)):
                text.encode()
                self._tokenizer.tokenize(text)
        except UnicodeEncodeError as error:
            detail = f"character {error.start} is half a surrogate pair"
            log.add("not valid Unicode", record.source, record.line, detail)
            return False
        except DataError as error:
            log.add("refused by the tokenizer", record.source, record.line, str(error))
            return False
        return True

    def _publish(self, prefixes: list[Path], report: PartReport) -> None:
        for index, prefix in enumerate(prefixes):
            target = get_part_prefix(self._folder, report.number, index)
            for ending in (".bin", ".idx"):
                path, published = Path(f"{prefix}{ending}"), Path(f"{target}{ending}")
                report.files[published.name] = compute_checksum(path)
                path.replace(published)
        path = Path(f"{prefixes[0]}.json")
        path.write_text(report.to_json(), encoding="utf-8")
        path.replace(get_report_path(self._folder, report.number))


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN = 60
_MISSING = object()


class Record(NamedTuple):
    """One document: its position, and for each key its text or its sentences."""

    source: int
    line: int
    texts: list[str | list[str]]


def iterate_records(piece: Piece, keys: tuple[str, ...], log: ProblemLog) -> Iterator[Record]:
    """The documents of a piece, with their line numbers.

    A record that lacks one of several keys is skipped for all of them, so that the keys' files keep
    describing the same documents. A list of strings is a document already split into sentences.
    """
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
