"""The whole run: check, cut, tokenize in workers, join in input order, then name, and report."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from rapidformer.compat.patches import variables
from rapidformer.data.indexed import IndexedDataset, IndexedWriter, choose_dtype
from rapidformer.data.preprocess.encoding import PartEncoder
from rapidformer.data.preprocess.inputs import Source
from rapidformer.data.preprocess.parts import (
    KeyCounts,
    PartReport,
    ProblemLog,
    WorkFolder,
    find_start,
    get_part_prefix,
)
from rapidformer.data.preprocess.progress import Progress, Summary, format_problems, name_place
from rapidformer.data.preprocess.reading import Part, read_parts
from rapidformer.data.preprocess.settings import PreprocessSettings, check_output_is_free, check_run
from rapidformer.data.tokenizers import Tokenizer
from rapidformer.errors import DataError, RapidformerError, count
from rapidformer.log import get_logger

_VERSION = 1
_PACKED_GROWS = 4  # about how much text a compressed byte holds, to estimate the number of parts


def preprocess(settings: PreprocessSettings, tokenizer: Tokenizer) -> Summary:
    """Turn the input into ``{prefix}_{key}_{document|sentence}.bin/.idx``.

    A killed run continues where it stopped when started again with the same settings.
    """
    run = _Run(settings, tokenizer, check_run(settings, tokenizer))
    begin = time.monotonic()
    run.open_folder()
    try:
        run.encode()
        run.check_result()
        run.join()
    except BaseException as error:
        explained = run.explain(error)
        if explained is error:
            raise
        raise explained from error
    run.folder.remove()
    return run.summarize(time.monotonic() - begin)


class _Run:
    """What the steps of a run share."""

    def __init__(
        self, settings: PreprocessSettings, tokenizer: Tokenizer, sources: list[Source]
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._sources = sources
        self._dtype = choose_dtype(tokenizer.vocab_size).name
        self._total_bytes = sum(source.size for source in sources)
        self._part_bytes = settings.get_part_bytes(self._total_bytes)
        packed = sum(source.size for source in sources if source.compression is not None)
        parts = (self._total_bytes + packed * (_PACKED_GROWS - 1)) // self._part_bytes + 1
        # This process may use fewer cores than the machine has; not every system says so.
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        self._workers = max(1, min(settings.workers or cores, parts))
        self._reports: dict[int, PartReport] = {}
        self._reused = self._reused_bytes = 0
        self.folder = WorkFolder(settings.get_work_folder())

    def open_folder(self) -> None:
        """Lock the work folder and find what is finished in it."""
        import tokenizers

        # Everything that decides what the parts hold.
        manifest: dict[str, Any] = {
            "version": _VERSION,
            "inputs": [[str(s.path.absolute()), s.size, s.modified] for s in self._sources],
            "settings": self._settings.describe_result(),
            "tokenizer": self._tokenizer.fingerprint,
            "tokenizers version": tokenizers.__version__,
            "token type": self._dtype,
            "part size": self._part_bytes,
        }
        if not self._settings.overwrite and not self.folder.is_publishing(manifest):
            check_output_is_free(self._settings)
        try:
            self._reports = self.folder.open(manifest)
        except OSError as error:
            raise DataError(f"{self.folder.path} cannot be written: {error.strerror}.") from error
        self._reused = len(self._reports)
        self._reused_bytes = sum(report.text_bytes for report in self._reports.values())
        if self._reused:
            get_logger().info(
                "resuming: %d finished parts (%.1f MB of input) found in %s",
                self._reused, self._reused_bytes / 1e6, self.folder.path,
            )  # fmt: skip

    def encode(self) -> None:
        get_logger().info(
            "%s, %.1f MB: %s (%s tokens, %s), %s",
            count(len(self._sources), "input file"), self._total_bytes / 1e6, self._tokenizer.name,
            f"{self._tokenizer.vocab_size:,}", self._dtype, count(self._workers, "worker"),
        )  # fmt: skip
        settings = self._settings
        start, number = find_start(self._reports)
        progress = Progress(self._total_bytes, start.disk_bytes, settings.log_interval)
        parts = read_parts(
            self._sources, keys=settings.json_keys, text_documents=settings.text_documents,
            part_bytes=self._part_bytes, max_documents=settings.max_documents, start=start,
            number=number,
        )  # fmt: skip

        def iterate_missing() -> Iterator[Part]:
            for part in parts:
                progress.announce(part.number, part.end.disk_bytes)
                if part.number in self._reports:
                    progress.skip(part.number)
                else:
                    yield part

        setup = (self._tokenizer, settings, self.folder.path, self._dtype)
        try:
            with closing(encode_parts(iterate_missing(), self._workers, setup)) as reports:
                for report in reports:
                    self._reports[report.number] = report
                    progress.add(report)
        finally:
            progress.close()

    def check_result(self) -> None:
        """Refuse bad lines under --strict, and an input without documents."""
        problems = self._merge_problems()
        first = problems.get_first()
        if self._settings.strict and first is not None:
            source, line, reason, detail = first
            place = f"{self._sources[source].path}, {name_place(self._sources[source])} {line}"
            raise _FinalError(
                f"{place}: {reason}{f' ({detail})' if detail else ''}. Fix it, or drop "
                "--strict: such lines are then counted and skipped."
            )
        if not any(counts.documents for counts in self._merge_counts()):
            listed = "\n".join(format_problems(problems, self._sources))
            empty = sum(counts.empty for counts in self._merge_counts())
            raise _FinalError(
                f"The input holds no document that can be written ({empty:,} empty): nothing was "
                f"written.\n{listed}"
            )

    def join(self) -> None:
        """Write the parts one after another under the output's names."""
        needed = sum(size for report in self._reports.values() for size, _ in report.files.values())
        free = shutil.disk_usage(self.folder.path).free
        if free < needed:
            raise DataError(
                f"The output needs {needed:,} bytes, but only {free:,} are free on the disk of "
                f"{self._settings.output_prefix}: free some space."
            )
        self.folder.start_publishing()
        for index, target in enumerate(self._settings.get_targets().values()):
            with IndexedWriter(target, self._dtype) as writer:
                for number in range(len(self._reports)):
                    # One at a time: a large run has more parts than a process may map files.
                    prefix = get_part_prefix(self.folder.path, number, index)
                    part = IndexedDataset(prefix)
                    writer.append_file(Path(f"{prefix}.bin"), part.sizes, part.doc_idx, None)

    def summarize(self, seconds: float) -> Summary:
        text_bytes = sum(report.text_bytes for report in self._reports.values())
        return Summary(
            outputs=self._settings.get_targets(),
            counts=dict(zip(self._settings.json_keys, self._merge_counts(), strict=True)),
            problems=self._merge_problems(), sources=self._sources, dtype=self._dtype,
            text_bytes=text_bytes, made_bytes=text_bytes - self._reused_bytes, seconds=seconds,
            workers=self._workers, parts=len(self._reports), reused_parts=self._reused,
        )  # fmt: skip

    def _merge_counts(self) -> list[KeyCounts]:
        merged = [KeyCounts() for _ in self._settings.json_keys]
        for report in self._reports.values():
            for total, counts in zip(merged, report.counts, strict=True):
                total.add(counts)
        return merged

    def _merge_problems(self) -> ProblemLog:
        log = ProblemLog()
        log.merge(self._reports[number].problems for number in sorted(self._reports))
        return log

    def explain(self, error: BaseException) -> BaseException:
        """The error, with a note on what can be resumed; if there is nothing, remove the folder."""
        # Counted on disk: a worker may have finished a part whose report was not read yet.
        finished = sum(path.stem.isdigit() for path in self.folder.path.glob("*.json"))
        kept = ""
        if isinstance(error, _FinalError) or not finished:
            self.folder.remove()
        else:
            self.folder.close()
            stay = "stays" if finished == 1 else "stay"
            kept = (
                f" {count(finished, 'finished part')} {stay} in {self.folder.path}: the same "
                "command continues from there."
            )
        if isinstance(error, KeyboardInterrupt):
            get_logger().warning("stopped;%s", kept or " nothing was finished.")
        elif isinstance(error, OSError):
            return DataError(f"{error.filename or 'A file'}: {error.strerror or error}.{kept}")
        elif isinstance(error, RapidformerError):
            return DataError(f"{error}{kept}")
        return error


class _FinalError(DataError):
    """An error after which the parts are useless."""


_PARTS_AHEAD = 2  # one in progress and one waiting, so that no worker waits for the disk
_SECONDS_TO_END = 5.0
_PARALLEL = "TOKENIZERS_PARALLELISM"


Setup = tuple[Tokenizer, PreprocessSettings, Path, str]
"""What a part encoder is built from."""


def encode_parts(
    parts: Iterator[Part], num_workers: int, setup: Setup
) -> Generator[PartReport, None, None]:
    """Reports in order of completion, by workers or this process; after a stop, those begun."""
    if num_workers > 1:
        crew = _Crew()
        try:
            for _ in range(num_workers):
                crew.start_worker(setup)
            yield from crew.distribute(parts)
        finally:
            crew.end_workers()
        return
    encoder = PartEncoder(*setup)
    for part in parts:
        # One worker is one core: `tokenizers` would take all of them.
        with variables({_PARALLEL: "false"}):
            report = encoder.encode(part)
        yield report
        if report.is_stopped:
            return


class _Crew:
    """Worker processes, by the connection to each."""

    def __init__(self) -> None:
        self._workers: dict[Connection[Any, Any], subprocess.Popen[bytes]] = {}

    def distribute(self, parts: Iterator[Part]) -> Iterator[PartReport]:
        under_way = dict.fromkeys(self._workers, 0)
        has_more = True
        while True:
            while has_more and min(under_way.values()) < _PARTS_AHEAD:
                part = next(parts, None)
                if part is None:
                    has_more = False
                    break
                idlest = min(under_way, key=lambda connection: under_way[connection])
                self._send(idlest, part)
                under_way[idlest] += 1
            busy = [connection for connection, count in under_way.items() if count]
            if not busy:
                return
            for ready in wait(busy):
                assert isinstance(ready, Connection)
                report = self._receive(ready)
                under_way[ready] -= 1
                # Parts in progress may hold an earlier bad line: wait for them.
                has_more &= not report.is_stopped
                yield report

    def _send(self, connection: Connection[Any, Any], message: Any) -> None:
        try:
            connection.send(message)
        except OSError:
            raise self._describe_death(connection) from None

    def _receive(self, connection: Connection[Any, Any]) -> PartReport:
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            raise self._describe_death(connection) from None
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, PartReport)
        return answer

    def _describe_death(self, connection: Connection[Any, Any]) -> DataError:
        worker = self._workers[connection]
        try:
            status = worker.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return DataError(f"The worker process {worker.pid} no longer answers.")
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        hint = " Usually memory ran out: use fewer --workers." if status == -9 else ""
        return DataError(f"The worker process {worker.pid} {how}.{hint}")

    def start_worker(self, setup: Setup) -> None:
        ours, theirs = Pipe()
        python_path = os.pathsep.join(path for path in sys.path if path)
        try:
            self._workers[ours] = subprocess.Popen(
                [sys.executable, "-m", "rapidformer.data.preprocess.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env={**os.environ, "PYTHONPATH": python_path, _PARALLEL: "false"},
            )
        finally:
            theirs.close()
        self._send(ours, setup)

    def end_workers(self) -> None:
        for connection, worker in self._workers.items():
            connection.close()
            worker.terminate()
        for worker in self._workers.values():
            try:
                worker.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
