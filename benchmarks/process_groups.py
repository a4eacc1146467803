"""Run a benchmark in several processes on this machine, forked so that imports happen once."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any


def run_in_group(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run ``function(*args)`` in every process, with the environment of a launched rank; results by
    rank.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, workers = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(
            target=_work, args=(sender, rank, world_size, port, function, args), daemon=True
        )
        worker.start()
        sender.close()
        pipes.append(receiver)
        workers.append(worker)
    try:
        return [pipe.recv() for pipe in pipes]
    except EOFError:
        raise SystemExit("a process failed: see its message above") from None
    finally:
        for worker in workers:
            worker.join(timeout=5)
            worker.kill()


def _work(sender: Any, rank: int, world_size: int, port: int, function: Any, args: Any) -> None:
    if world_size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        sender.send(function(*args))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sender.close()
        os._exit(0)
