"""``rapidformer predict --chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

from rapidformer.dist.collectives import broadcast_object, is_alone
from rapidformer.dist.heartbeat import beat
from rapidformer.engine import RapidformerEngine, predict_rows
from rapidformer.log import get_logger
from rapidformer.tasks.chat.columns import ChatColumns
from rapidformer.tasks.chat.features import build_encoder
from rapidformer.tasks.chat.prompts import build_system
from rapidformer.tasks.chat.turns import Message
from rapidformer.tasks.evaluation.generating import decode_answers, generate
from rapidformer.tasks.evaluation.predicting import AnswerStreamer, compose_task_model
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.text.text import tokenize

_LEAVE, _START_OVER = ("/exit", "/quit"), "/new"
_WAITING = "\0"
_PATIENCE_SECONDS = 30
_GREETING = [{"messages": [{"role": "user", "content": "Hello."}]}]


def run_chat(engine: RapidformerEngine) -> None:
    """Answer one line after the other, until the input ends or the user leaves."""
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


class Conversation:
    """Remembers the turns; the first rank prints answers while they are generated."""

    def __init__(self, engine: RapidformerEngine) -> None:
        task = get_task(engine.args.task or "")
        # Loads the tokenizer and checks the template, before the slow model.
        self._prepared = task.prepare_for_prediction(engine.args, _GREETING)
        self._engine = engine
        self._model = compose_task_model(engine, task, self._prepared)
        self._encoder = build_encoder(
            self._prepared.processor, ChatColumns(messages="messages"), engine.args,
            self._prepared.extras["prompt_length"],
        )  # fmt: skip
        stop_strings = engine.args.stop_strings or ()
        self._streamer = (
            AnswerStreamer(self._prepared.processor, stop_strings) if engine.is_main else None
        )
        self._system = build_system(engine.args)
        self._messages: list[Message] = []
        self._turns = 0

    def start_over(self) -> None:
        """Forget everything that was said."""
        self._messages = []

    def answer(self, text: str) -> str:
        """The model's answer to what the user says next; every rank must call this."""
        self._messages.append({"role": "user", "content": text})
        ids = self._encode()
        row = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        seed = self._engine.args.seed + self._turns
        (tokens,) = predict_rows(
            self._engine.data, self._engine.model, [row], self._generate, self._prepared.collate,
            batch_size=1, seed=seed,
        )  # fmt: skip
        self._turns += 1
        generation, tokenizer = self._prepared.extras["generation"], self._prepared.processor
        answer = decode_answers(tokens, tokenizer, generation)[0].strip()
        self._messages.append({"role": "assistant", "content": answer})
        return answer

    def _generate(self, batch: dict[str, Any]) -> list[Any]:
        generation = self._prepared.extras["generation"]
        return generate(self._model, batch, self._prepared.processor, generation, self._streamer)

    def _encode(self) -> list[int]:
        """The tokens of the conversation; the oldest turns are forgotten if it is too long."""
        assert self._encoder.template is not None
        while True:
            text = self._encoder.template.render([*self._system, *self._messages], lets_answer=True)
            ids = list(tokenize([text], self._encoder.tokenizer)[0])
            if len(ids) <= self._encoder.length or len(self._messages) < 3:
                return ids[-self._encoder.length :]
            get_logger().warning(
                "the conversation is longer than %d tokens: its oldest turn is forgotten",
                self._encoder.length,
            )
            del self._messages[:2]
