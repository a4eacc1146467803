"""Find and read conversations with images, in any usual format; errors say what is wrong.

In the text of a message, ``MARK`` stands for an image. Formats differ in how they name the places:
content parts of type image (with the image in them, or in a column of the row), or ``<image>`` in
the text. A row that names none shows its images before the first user message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import DataError
from rapidformer.log import warn_once
from rapidformer.tasks.chat.columns import ChatColumns, find_chat_columns
from rapidformer.tasks.chat.turns import (
    BadRowError,
    Message,
    build_turns,
    read_messages,
    split_answer,
)
from rapidformer.tasks.rows.columns import as_optional, find_column
from rapidformer.tasks.rows.named_files import IMAGES
from rapidformer.tasks.rows.rows import get_column_names
from rapidformer.tasks.text.text import TEXT

MARK = "\ufffc<image>\ufffc"
_WRITTEN = "<image>"
_TEXTS, _IMAGES = ("text", "input_text"), ("image", "image_url", "input_image")
_KEYS = ("image", "path", "url", "base64", "image_url")


class Conversation(NamedTuple):
    """The turns of a row, and an image for each ``MARK`` in them, in order."""

    messages: list[Message]
    images: list[Any]

    def cut(self, count: int) -> Conversation:
        """The first turns, and their images."""
        messages = self.messages[:count]
        return Conversation(messages, self.images[: count_marks(messages)])

    def split_answer(self) -> tuple[Conversation, str | None]:
        """The conversation up to the requested answer, and that answer if the row has it."""
        asked, answer = split_answer(self.messages)
        return self.cut(len(asked)), answer


def count_marks(messages: Sequence[Message]) -> int:
    """The images in these turns."""
    return sum(message["content"].count(MARK) for message in messages)


def read_conversation(
    row: Mapping[str, Any], columns: ChatColumns, image_column: str | None
) -> Conversation:
    """The turns of a row with its images; raises BadRowError."""
    given = _list_images(row.get(image_column)) if image_column is not None else []
    reader = _ContentReader()
    messages = _read_turns(row, columns, reader)
    if given and not reader.images:
        asked = next((turn for turn in messages if turn["role"] == "user"), None)
        if asked is None:
            raise BadRowError("has images, but no user message to show them in")
        asked["content"] = MARK * len(given) + asked["content"]
        return Conversation(messages, given)
    places = sum(image is None for image in reader.images)
    if places != len(given):
        hint = "" if image_column else " (--image-column names the column with images)"
        raise BadRowError(
            f"names {_count(places, 'place')} for images (<image>, or parts of type image), but "
            f"has {_count(len(given), 'image')} to show there{hint}"
        )
    waiting = iter(given)
    images = [next(waiting) if image is None else image for image in reader.images]
    return Conversation(messages, images)


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'s' * (number != 1)}"


def _list_images(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (bool, int, float)):
        raise BadRowError(f"has a {type(value).__name__} instead of an image or a list of images")
    return [value]


def _read_turns(
    row: Mapping[str, Any], columns: ChatColumns, reader: _ContentReader
) -> list[Message]:
    if columns.messages is not None:
        return read_messages(row.get(columns.messages), reader)
    prompt = row.get(str(columns.prompt))
    answer = None if columns.response is None else row.get(columns.response)
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        return read_messages(prompt, reader) + (read_messages(answer, reader) if answer else [])
    texts = {name: row.get(name) for name in columns.get_names()}
    for name, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise BadRowError(f"has a {type(text).__name__} instead of text in the column {name}")
    context, system = (row.get(name or "") or "" for name in (columns.context, columns.system))
    has_answer = columns.response is not None
    turns = build_turns(system, prompt or "", context, (answer or "") if has_answer else None)
    return [{**turn, "content": reader(turn["content"])} for turn in turns]


class _ContentReader:
    """Reads the contents of messages in order, and keeps their images; None where one is due."""

    def __init__(self) -> None:
        self.images: list[Any] = []

    def __call__(self, content: Any) -> str:
        if isinstance(content, str):
            return self._read_text(content)
        if not isinstance(content, Sequence):
            raise BadRowError("has a message whose content is neither text nor a list of parts")
        return "".join(map(self._read_part, content))

    def _read_text(self, text: str) -> str:
        self.images += [None] * text.count(_WRITTEN)
        return text.replace(_WRITTEN, MARK)

    def _read_part(self, part: Any) -> str:
        if isinstance(part, str):
            return self._read_text(part)
        if not isinstance(part, Mapping):
            raise BadRowError(f"has a {type(part).__name__} instead of a part of a message")
        kind = part.get("type") or ("text" if isinstance(part.get("text"), str) else "image")
        if kind in _TEXTS and isinstance(part.get("text"), str):
            return self._read_text(part["text"])
        if kind not in _IMAGES:
            raise BadRowError(
                f"has a part of type {kind!r} in a message: only text and images are read"
            )
        # Tables on disk give every part the keys of all parts, with None for the missing ones.
        key = next((key for key in _KEYS if part.get(key) is not None), "")
        value = part.get(key)
        if isinstance(value, Mapping) and "url" in value:  # OpenAI's
            value = value["url"]
        if key == "base64" and not str(value).startswith("data:"):
            value = f"data:;base64,{value}"
        self.images.append(value)
        return MARK


def find_image_columns(
    rows: Any, args: DataArguments, *, has_answers: bool
) -> tuple[ChatColumns, str | None]:
    """The columns of the turns, and that of the images if there is one."""
    available = get_column_names(rows)
    columns = find_chat_columns(rows, args, as_optional(TEXT), has_answers=has_answers)
    if columns is None:
        raise DataError(
            "--task image_text needs conversations (--messages-column), or prompts with answers "
            f"(--prompt-column and --response-column). The data has {', '.join(available)}."
        )
    if columns.tools is not None:
        warn_once(f"--task image_text shows no tools to the model: {columns.tools} is not read.")
    return columns, find_column(IMAGES, available, args, columns.get_names())
