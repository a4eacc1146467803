"""The workers of a run: parts go to whoever is free, and reports come back as they finish.

Processes are started by name (`python -m`), not forked and not by `multiprocessing`, which would
run the user's script again in each of them. They have their own process group: Ctrl-C reaches only
this process, which then stops them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from rapidformer.data.preprocess.encoding import PartEncoder
from rapidformer.data.preprocess.parts import PartReport
from rapidformer.data.preprocess.reading import Part
from rapidformer.data.preprocess.settings import PreprocessSettings
from rapidformer.data.tokenizers import Tokenizer
from rapidformer.errors import DataError

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
        with _on_one_core():
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


@contextmanager
def _on_one_core() -> Iterator[None]:
    """One worker is one core: `tokenizers` would take all of them."""
    before = os.environ.get(_PARALLEL)
    os.environ[_PARALLEL] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLEL]
        else:
            os.environ[_PARALLEL] = before
