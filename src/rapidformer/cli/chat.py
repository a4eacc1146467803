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
    _say(engine, "Type a message; /new starts over, /exit or Ctrl-D leaves.")
    while (line := _read_for_all(is_reading=engine.is_main)) not in (None, *_LEAVE):
        if line == _START_OVER:
            conversation.start_over()
        elif line:
            conversation.answer(line)
    _say(engine, "")


def _say(engine: RapidformerEngine, text: str) -> None:
    if engine.is_main:
        print(text, file=sys.stderr, flush=True)


def _read_for_all(*, is_reading: bool) -> str | None:
    """The next line of standard input on every rank; None at the end. Only the first rank reads."""
    if is_alone():
        return _read_line()
    lines: queue.Queue[str | None] = queue.Queue()
    if is_reading:
        threading.Thread(target=lambda: lines.put(_read_line()), daemon=True).start()
    while True:
        line: str | None = None
        if is_reading:
            try:
                line = lines.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                line = _WAITING  # ranks wait for each other only so long
        line = broadcast_object(line)
        if line != _WAITING:
            return line
        beat("chat")


def _read_line() -> str | None:
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None
