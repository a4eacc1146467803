"""``rapidformer predict --chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import queue
import sys
import threading
from typing import TYPE_CHECKING

from rapidformer.dist.collectives import broadcast_object, is_alone
from rapidformer.dist.heartbeat import beat

if TYPE_CHECKING:
    from rapidformer.engine import RapidformerEngine

_LEAVE, _START_OVER = ("/exit", "/quit"), "/new"
_WAITING = "\0"
_PATIENCE_SECONDS = 30


def run_chat(engine: RapidformerEngine) -> None:
    """Answer one line after the other, until the input ends or the user leaves."""
    from rapidformer.tasks.chat.conversation import Conversation

    conversation = Conversation(engine)
    reader = _LineReader(is_reading=engine.is_main)
    _say(engine, "Type a message; /new starts over, /exit or Ctrl-D leaves.")
    while (line := reader.read()) is not None and line not in _LEAVE:
        if line == _START_OVER:
            conversation.start_over()
        elif line:
            conversation.answer(line)
    _say(engine, "")


def _say(engine: RapidformerEngine, text: str) -> None:
    if engine.is_main:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class _LineReader:
    """Lines of standard input on every rank; only the first rank reads.

    The others must not wait for a line longer than ranks wait for each other. So until there is
    one, the first rank keeps sending them that there is none.
    """

    def __init__(self, *, is_reading: bool) -> None:
        self._is_reading = is_reading
        self._lines: queue.Queue[str | None] = queue.Queue()

    def read(self) -> str | None:
        """The next line without its end; None at the end of the input."""
        if is_alone():
            return _read_line()
        if self._is_reading:
            threading.Thread(target=lambda: self._lines.put(_read_line()), daemon=True).start()
        while (line := broadcast_object(self._poll())) == _WAITING:
            beat("chat")
        return line

    def _poll(self) -> str | None:
        if not self._is_reading:
            return None
        try:
            return self._lines.get(timeout=_PATIENCE_SECONDS)
        except queue.Empty:
            return _WAITING


def _read_line() -> str | None:
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline()
    return line.strip() if line else None
