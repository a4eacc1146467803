"""Run a function in several processes with gloo, and bring back what each returns.

Forked from the test's own process: torch and transformers are imported already, so two processes
cost a tenth of a second instead of several.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PATIENCE = 240
"""Seconds before something that should happen counts as hanging. Long, because a busy machine is
slow and a test that passes never waits for it; below pytest's own limit, whose report says less."""


class RankCrashedError(AssertionError):
    """A rank was ended by a signal: native code crashed, or something killed it."""


def run_in_processes(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """``function(*args)`` in every process; results in rank order. One failure fails the call.

    If a rank crashes, the call is repeated once, with a warning: on a busy machine a rank dies in
    native code now and then (seen twice), for a reason that has not been found. A crash that comes
    back fails the call.
    """
    try:
        return _run_once(function, world_size, args)
    except RankCrashedError as error:
        warnings.warn(f"a rank crashed, and its test was repeated: {error}", stacklevel=2)
        return _run_once(function, world_size, args)


def _run_once(function: Callable[..., Any], world_size: int, args: Any) -> list[Any]:
    context = multiprocessing.get_context("fork")
    port = find_free_port()
    pipes, workers = [], []
    released = context.Event()
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(
            target=_work,
            args=(sender, released, rank, world_size, port, function, args),
            daemon=True,
        )
        worker.start()
        sender.close()
        pipes.append(receiver)
        workers.append(worker)
    try:
        return _receive_all(pipes, workers)
    finally:
        released.set()
        for worker in workers:
            worker.join(timeout=5)
            worker.kill()


def _receive_all(pipes: list[Connection], workers: list[Any]) -> list[Any]:
    """In whatever order they come: a rank's failure is reported while others wait for it."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), PATIENCE)
        if not ready:
            raise AssertionError(f"no answer from {list(waiting.values())} within {PATIENCE} s")
        for pipe in ready:
            is_fine, results[waiting[pipe]] = _receive(pipe)
            if not is_fine:
                failure = f"rank {waiting[pipe]} failed:\n{results[waiting[pipe]]}"
                failure += _describe_others(waiting[pipe], pipes, workers)
                has_crashed = any((worker.exitcode or 0) < 0 for worker in workers)
                raise RankCrashedError(failure) if has_crashed else AssertionError(failure)
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        return False, "it ended without an answer"


def _describe_others(failed: int, pipes: list[Connection], workers: list[Any]) -> str:
    """What became of the other ranks: one that crashed makes the rest fail before it is noticed."""
    lines = []
    for rank, (pipe, worker) in enumerate(zip(pipes, workers, strict=True)):
        worker.join(timeout=1)
        if worker.exitcode not in (None, 0):
            lines.append(f"rank {rank} ended with {worker.exitcode}")
        elif rank != failed and pipe.poll():
            is_fine, result = _receive(pipe)
            lines += [] if is_fine else [f"rank {rank} failed as well:\n{result}"]
    return "".join(f"\n{line}" for line in lines)


def _work(
    sender: Any,
    released: Any,
    rank: int,
    world_size: int,
    port: int,
    function: Callable[..., Any],
    args: Any,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        sender.send((True, function(*args)))
        # The first process has the store: whoever is still under way must not lose it.
        released.wait(PATIENCE)
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        # Not a normal exit: the parent's atexit handlers and test fixtures are not ours to run.
        os._exit(0)


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
