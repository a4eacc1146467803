"""A chat template that is given images: as parts of a message, or as the processor's own token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rapidformer.errors import ModelError
from rapidformer.tasks.chat.template import ChatTemplate, Span
from rapidformer.tasks.chat.turns import BadRowError, Message
from rapidformer.tasks.image_text.conversations import MARK


class ImageTemplate(ChatTemplate):
    """Renders messages whose text has a ``MARK`` for each image.

    Most templates of such models go over a list of parts; one for text alone gets a string.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any], image_token: str) -> None:
        self._image_token = image_token
        self._tokenizer = tokenizer
        self.variables = dict(variables)
        self._takes_parts = True
        self._takes_parts = self._shows_parts()
        super().__init__(tokenizer, variables)

    def render(
        self, messages: Sequence[Message], *, lets_answer: bool = False, **variables: Any
    ) -> str:
        return super().render(self._shape(messages), lets_answer=lets_answer, **variables)

    def _render_marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        return super()._render_marked(self._shape(messages))

    def _shape(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that the template takes."""
        return [{**turn, "content": self._shape_content(turn["content"])} for turn in messages]

    def _shape_content(self, content: str) -> Any:
        if not self._takes_parts:
            return content.replace(MARK, self._image_token)
        parts: list[dict[str, str]] = []
        for number, text in enumerate(content.split(MARK)):
            parts += [{"type": "image"}] * bool(number)
            parts += [{"type": "text", "text": text}] * bool(text)
        return parts

    def _shows_parts(self) -> bool:
        """Whether an image that is a part of a message appears in the text."""
        try:
            text = self.render([{"role": "user", "content": f"{MARK}?"}])
        except BadRowError:
            return False
        # A template for text alone may print the list of parts as it is.
        return self._image_token in text and "'type'" not in text


def check_shows_images(text: str, image_token: str, count: int) -> None:
    """Refuse a rendered conversation in which images are missing or too many."""
    shown = text.count(image_token)
    if shown != count:
        raise BadRowError(
            f"has {count} images, but its text has the model's image token {image_token!r} {shown} "
            "times: the chat template leaves images out, or the row's own text has the token"
        )


def get_image_token(processor: Any) -> str:
    """What stands for an image in a text, before the processor expands it."""
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str):
        raise ModelError(
            f"{type(processor).__name__} does not say which token stands for an image, so its "
            "places in a text cannot be found: choose another model."
        )
    return token
