"""A worker process: receives parts and sends reports. Started by `run.py`, never by hand.

A thread does the receiving, so that a closed connection is noticed in the middle of a part. It
closes when the run is over or was killed, and ends the worker at once; an unfinished part leaves
only files under the worker's own names.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from rapidformer.data.preprocess.encoding import PartEncoder
from rapidformer.errors import RapidformerError


def main(descriptor: int) -> None:
    """Work until the other end closes."""
    connection = Connection(descriptor)
    encoder = PartEncoder(*connection.recv())
    parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, parts), daemon=True).start()
    while True:
        answer: Any
        try:
            answer = encoder.encode(parts.get())
        except (RapidformerError, OSError) as error:
            answer = error
        except Exception:
            answer = RuntimeError(f"a worker failed:\n{traceback.format_exc()}")
        connection.send_bytes(pickle.dumps(answer))


def _receive(connection: Connection, parts: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            parts.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
