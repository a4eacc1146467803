"""Run a function in several processes with gloo, and bring back what each returns.

Forked from the test's own process: torch and transformers are imported already, so two processes
cost a tenth of a second instead of several.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

_TIMEOUT = 120


def run_in_processes(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """``function(*args)`` in every process; results in rank order. One failure fails the call."""
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
        return [_receive(pipe, rank) for rank, pipe in enumerate(pipes)]
    finally:
        released.set()
        for worker in workers:
            worker.join(timeout=5)
            worker.kill()


def _receive(pipe: Any, rank: int) -> Any:
    if not pipe.poll(_TIMEOUT):
        raise AssertionError(f"rank {rank} did not answer within {_TIMEOUT} s")
    is_fine, value = pipe.recv()
    if not is_fine:
        raise AssertionError(f"rank {rank} failed:\n{value}")
    return value


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
        released.wait(_TIMEOUT)
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
