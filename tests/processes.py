"""Run a function in several processes with gloo, and bring back what each returns.

Each rank is forked from the warm Python (tests/warm_python.py), which has imported torch and
transformers and runs a single thread. It is not forked from the test's own process: that has
threads (autograd's, gloo's, xdist's), whose locks and half-written state a fork would inherit. So a
rank knows the environment, the working folder and what it is called with, but nothing that the test
has patched in its own process.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PATIENCE = 240
"""Seconds before something that should happen counts as hanging. Long, because a busy machine is
slow and a test that passes never waits for it; below pytest's own limit, whose report says less."""

MOST_CALLS = 20
"""After so many, kept processes are replaced: what they hold only grows."""

MOST_IDLE_SECONDS = 30
"""After so many, they are ended: gloo's threads wake up a hundred times a second, each of them, and
starting other ranks takes less than a minute of that."""

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One started process, seen from the test."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: Connection
    crash_report: Path

    def receive(self) -> tuple[bool, Any]:
        """Whether it returned, and what; otherwise its traceback, or how it crashed."""
        try:
            return pickle.loads(self.pipe.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            return False, f"it ended without an answer{self.describe_end()}"

    def describe_end(self) -> str:
        """The signal or status, and the stacks of its threads at that moment."""
        try:
            status = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return ""
        report = self.crash_report.read_text() if self.crash_report.exists() else ""
        return f" (status {status})\n{report}" if status else ""


class Group:
    """Ranks that were started together, and take one call after the other."""

    def __init__(self, world_size: int) -> None:
        from tests.warm_python import get_warm_python

        # The warm Python removes its folder at the end, and this with it.
        folder = Path(tempfile.mkdtemp(dir=get_warm_python().parent))
        self.ranks = [_start(number, world_size, folder) for number in range(world_size)]
        self.calls = 0
        self.last_call_at = 0.0

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """``function(*args)`` in every rank; results in rank order. One failure fails the call."""
        import cloudpickle  # functions inside tests and lambdas, too

        self.calls += 1
        port, work = find_free_port(), cloudpickle.dumps((function, args))
        for rank in self.ranks:
            variables = {
                **os.environ,
                "RANK": str(rank.number),
                "LOCAL_RANK": str(rank.number),
                "WORLD_SIZE": str(len(self.ranks)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **_get_own_variables(),
            }
            rank.pipe.send_bytes(pickle.dumps((variables, str(Path.cwd()), work)))
        return _receive_all(self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.pipe.close()  # a rank that has answered waits for this
        for rank in self.ranks:
            _end(rank.process)


def run_in_processes(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """``function(*args)`` in new processes; results in rank order. One failure fails the call."""
    group = Group(world_size)
    try:
        return group.call(function, args)
    finally:
        group.close()


def run_in_kept_processes(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """The same in ranks that stay for the next call: what torch does once is done once.

    They keep their process group, too. For functions that patch nothing.
    """
    group = _kept.pop(world_size, None) or Group(world_size)
    is_kept = False
    try:
        results = group.call(function, args)
        is_kept = group.calls < MOST_CALLS
        group.last_call_at = time.monotonic()
    finally:
        if is_kept:
            _kept[world_size] = group
        else:
            group.close()
    return results


def end_idle_processes() -> None:
    """End those that were kept, but not called for a while."""
    latest = time.monotonic() - MOST_IDLE_SECONDS
    for world_size in [size for size, group in _kept.items() if group.last_call_at < latest]:
        _kept.pop(world_size).close()


_kept: dict[int, Group] = {}


def _start(number: int, world_size: int, folder: Path) -> Rank:
    from tests.warm_python import get_warm_python

    mine, theirs = Pipe()
    report = folder / f"crash-{number}"
    process = subprocess.Popen(
        [get_warm_python(), "-m", "tests.processes", report, str(theirs.fileno())],
        env={**os.environ, **_get_own_variables()},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    return Rank(number=number, process=process, pipe=mine, crash_report=report)


def _get_own_variables() -> dict[str, str]:
    from tests.warm_python import TIED_VARIABLE

    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    return {"PYTHONPATH": path, TIED_VARIABLE: "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _receive_all(ranks: list[Rank]) -> list[Any]:
    """In whatever order they come: a rank's failure is reported while others wait for it."""
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = {rank.pipe: rank for rank in ranks if rank.number not in results}
        ready = wait(list(waiting), PATIENCE)
        if not ready:
            numbers = [rank.number for rank in waiting.values()]
            raise AssertionError(f"no answer from {numbers} within {PATIENCE} s")
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            is_fine, results[rank.number] = rank.receive()
            if not is_fine:
                failure = f"rank {rank.number} failed:\n{results[rank.number]}"
                raise AssertionError(failure + _describe_others(rank, ranks))
    return [results[rank.number] for rank in ranks]


def _describe_others(failed: Rank, ranks: list[Rank]) -> str:
    """What became of the other ranks: one that crashed makes the rest fail before it is noticed."""
    failures = ""
    for rank in ranks:
        if rank is not failed and rank.pipe.poll(1):
            is_fine, result = rank.receive()
            failures += "" if is_fine else f"\nrank {rank.number} failed as well:\n{result}"
    return failures


def work(report: Path, pipe: Connection) -> None:
    """The rank's side: run what is sent and answer, until the test's side closes the pipe."""
    faulthandler.enable(report.open("w"))
    is_fine = True
    try:
        while is_fine:
            variables, folder, call = pickle.loads(pipe.recv_bytes())
            is_fine, answer = _run(variables, folder, call)
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(answer)
    finally:
        # Not a normal exit: a process group that another rank has left would be waited for.
        os._exit(0)


def _run(variables: dict[str, str], folder: str, call: bytes) -> tuple[bool, bytes]:
    """Whether the call has returned, and the answer.

    The process group stays for the next call: torch caches what it does with a group, and would use
    one that is gone.
    """
    import numpy as np
    import torch

    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(1)
    random.seed(0)  # every rank alike, and every time
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        function, args = pickle.loads(call)
        # Pickled here: torch would share tensors' memory, which ends with this process.
        return True, pickle.dumps((True, function(*args)))
    except BaseException:
        return False, pickle.dumps((False, traceback.format_exc()))


def find_free_port() -> int:
    """One that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(
    is_so: Callable[[], object],
    seconds: float = PATIENCE,
    describe: Callable[[], str] = lambda: "",
) -> None:
    """Look again and again; ``describe`` says what is there when it is given up."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain\n{describe()}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


if __name__ == "__main__":
    work(Path(sys.argv[1]), Connection(int(sys.argv[2])))
