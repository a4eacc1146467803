"""``rapidformer predict --chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import queue
import sys
import threading
from functools import cached_property
from typing import Any

from rapidformer.cli.own_flags import say
from rapidformer.dist.collectives import broadcast_object, is_alone
from rapidformer.dist.heartbeat import beat
from rapidformer.engine import RapidformerEngine, predict_rows
from rapidformer.errors import DataError
from rapidformer.log import get_logger
from rapidformer.tasks.chat.columns import ChatColumns
from rapidformer.tasks.chat.features import ChatEncoder, build_encoder
from rapidformer.tasks.chat.prompts import build_system
from rapidformer.tasks.chat.turns import Message
from rapidformer.tasks.evaluation.generating import decode_answers, generate
from rapidformer.tasks.evaluation.predicting import AnswerStreamer, compose_task_model
from rapidformer.tasks.image_text.conversations import MARK, count_marks
from rapidformer.tasks.image_text.conversations import Conversation as ImageChat
from rapidformer.tasks.image_text.encoding import QuestionCollator, Rendered
from rapidformer.tasks.image_text.image_text import ImageText
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.rows.named_files import open_image
from rapidformer.tasks.text.text import tokenize

_LEAVE, _START_OVER, _SHOW = ("/exit", "/quit"), "/new", "/image "
_WAITING = "\0"
_PATIENCE_SECONDS = 30
_GREETING = [{"messages": [{"role": "user", "content": "Hello."}]}]


def run_chat(engine: RapidformerEngine) -> None:
    """Answer one line after the other, until the input ends or the user leaves."""
    sees = engine.args.task == ImageText.name
    conversation = ImageConversation(engine) if sees else Conversation(engine)
    pictures = "/image FILE shows a picture with the next message; " if sees else ""
    _say(engine, f"Type a message; {pictures}/new starts over, /exit or Ctrl-D leaves.")
    while (line := _read_for_all(is_reading=engine.is_main)) not in (None, *_LEAVE):
        if line == _START_OVER:
            conversation.start_over()
        elif isinstance(conversation, ImageConversation) and line.startswith(_SHOW):
            try:
                conversation.show(line.removeprefix(_SHOW).strip())
            except DataError as error:
                _say(engine, str(error))
        elif line:
            conversation.answer(line)
    _say(engine, "")


def _say(engine: RapidformerEngine, text: str) -> None:
    if engine.is_main:
        say(text)


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

    has_images = False

    def __init__(self, engine: RapidformerEngine) -> None:
        task = get_task(engine.args.task or "")
        # Loads the tokenizer and checks the template, before the slow model.
        self._prepared = task.prepare_for_prediction(engine.args, _GREETING)
        self._engine = engine
        self._model = compose_task_model(engine, task, self._prepared)
        self._length: int = self._prepared.extras["prompt_length"]
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
        seed = self._engine.args.seed + self._turns
        (tokens,) = predict_rows(
            self._engine.data, self._engine.model, [self._encode()], self._generate,
            self._prepared.collate,
            batch_size=1, seed=seed,
        )  # fmt: skip
        self._turns += 1
        generation, tokenizer = self._prepared.extras["generation"], self._prepared.processor
        answer = decode_answers(tokens, tokenizer, generation)[0].strip()
        self._messages.append({"role": "assistant", "content": answer})
        return answer

    def _generate(self, batch: dict[str, Any]) -> list[Any]:
        generation, inputs = self._prepared.extras["generation"], batch if self.has_images else None
        return generate(
            self._model, batch, self._prepared.processor, generation, self._streamer, inputs=inputs
        )

    @cached_property
    def _encoder(self) -> ChatEncoder:
        columns = ChatColumns(messages="messages")
        return build_encoder(self._prepared.processor, columns, self._engine.args, self._length)

    def _encode(self) -> dict[str, Any]:
        """The conversation as a row; the oldest turns are forgotten if it is too long."""
        template = self._encoder.template
        assert template is not None
        while True:
            text = template.render([*self._system, *self._messages], lets_answer=True)
            ids = list(tokenize([text], self._encoder.tokenizer)[0])
            if len(ids) <= self._length or len(self._messages) < 3:
                ids = ids[-self._length :]
                return {"input_ids": ids, "attention_mask": [1] * len(ids)}
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        get_logger().warning(
            "the conversation is longer than %d tokens: its oldest turn is forgotten", self._length
        )
        del self._messages[:2]


class ImageConversation(Conversation):
    """One with pictures: those of --image come with the first message."""

    has_images = True

    def __init__(self, engine: RapidformerEngine) -> None:
        super().__init__(engine)
        self._images: list[Any] = []
        self._next: list[Any] = []
        self.start_over()

    def start_over(self) -> None:
        super().start_over()
        self._images, self._next = [], []
        for path in self._engine.args.image or ():
            self.show(path)

    def show(self, path: str) -> None:
        """Show a picture with the next message."""
        self._next.append(open_image(path, "/image"))

    def answer(self, text: str) -> str:
        shown, self._next = self._next, []
        self._images += shown
        return super().answer(MARK * len(shown) + text)

    def _encode(self) -> dict[str, Any]:
        collate = self._prepared.collate
        assert isinstance(collate, QuestionCollator)
        while True:
            chat = ImageChat([*self._system, *self._messages], self._images)
            text = Rendered(collate.encoder.render_question(chat), [])
            sizes = [image.size for image in self._images]
            ((length, _),) = collate.encoder.count_tokens([text], [sizes])
            if length <= self._length:
                return {"conversation": chat, "images": self._images, "place": "the conversation"}
            if len(self._messages) < 3:
                raise DataError(
                    f"the message has {length} tokens with its images, and {self._length} leave "
                    "room for the answer: show fewer or smaller images."
                )
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        del self._images[: count_marks(self._messages[:2])]
        super()._forget_oldest()
