"""Turn one part of the input into one pair of files per key, with a report.

The report is published last, so a part without one does not exist. Files are created under the
process's own names: a worker that briefly outlives a killed run and its successor may work on the
same part, and either may publish it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

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
from rapidformer.data.preprocess.reading import Part
from rapidformer.data.preprocess.records import Record, iterate_records
from rapidformer.data.preprocess.sentences import build_splitter
from rapidformer.data.preprocess.settings import PreprocessSettings
from rapidformer.data.tokenizers import Tokenizer
from rapidformer.errors import DataError

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
        """Write the files of a part; the report is on disk when this returns.

        Under --strict, if a line is bad, nothing is written and the report says so.
        """
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
