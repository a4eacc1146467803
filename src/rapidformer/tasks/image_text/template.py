"""A chat template that is given images: as parts of a message, or as the processor's own token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rapidformer.errors import ModelError
from rapidformer.tasks.chat.template import ChatTemplate
from rapidformer.tasks.chat.turns import BadRowError
from rapidformer.tasks.image_text.conversations import MARK


class ImageTemplate(ChatTemplate):
    """Renders messages whose text has a ``MARK`` for each image.

    Most templates of such models go over a list of parts; one for text alone gets a string.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any], image_token: str) -> None:
        self._image_token = image_token
        super().__init__(tokenizer, variables)

    def _shape_content(self, content: str) -> Any:
        if not self._takes_parts:
            return content.replace(MARK, self._image_token)
        parts: list[dict[str, str]] = []
        for number, text in enumerate(content.split(MARK)):
            parts += [{"type": "image"}] * bool(number)
            parts += [{"type": "text", "text": text}] * bool(text)
        return parts

    def _find_takes_parts(self) -> bool:
        """Whether an image that is a part of a message appears in the text."""
        question = {"role": "user", "content": f"{MARK}?"}
        return self._shows([question], self._image_token, takes_parts=True)


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
