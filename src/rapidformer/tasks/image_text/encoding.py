"""From conversations to batches: one call of the model's processor for text and images together.

The processor expands an image's token to as many as the model needs, and says where. Answers are
found in the text as the template renders it, and their places moved by what was inserted before
them. What the processor inserts is never a label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rapidformer.data.streams.left_out import LeftOut
from rapidformer.errors import DataError, ModelError
from rapidformer.tasks.base import IGNORED_LABEL, Batch
from rapidformer.tasks.chat.features import mark_tokens, render_row
from rapidformer.tasks.chat.template import ChatTemplate, Span
from rapidformer.tasks.chat.turns import BadRowError
from rapidformer.tasks.image_text.conversations import MARK, Conversation

_OFFSETS, _PLACES = "text_replacement_offsets", "offset_mapping"
_BLANK = (32, 32)


class Rendered(NamedTuple):
    """A conversation as text, before images are expanded, and its answers in it."""

    text: str
    spans: list[Span]


class Expansion(NamedTuple):
    """What the processor has put in place of an image."""

    before: Span
    after: Span


@dataclass
class ImageEncoder:
    """Everything that determines how conversations become a batch."""

    processor: Any
    template: ChatTemplate
    trains_on_prompts: bool = False
    _inserted: dict[tuple[int, int], str] = field(default_factory=dict)
    """The text that replaces an image, by its width and height, on which alone it depends."""

    def __post_init__(self) -> None:
        self.image_token = get_image_token(self.processor)

    def render(self, conversation: Conversation) -> Rendered | str:
        """The text with its answers, or why there is nothing to train on; raises BadRowError."""
        rendered = render_row(conversation.messages, self.template, self.trains_on_prompts)
        if isinstance(rendered, str):
            return rendered
        check_shows_images(rendered[0], self.image_token, len(conversation.images))
        return Rendered(*rendered)

    def render_question(self, conversation: Conversation) -> str:
        """The text up to where the answer begins; raises BadRowError."""
        text = self.template.render(conversation.messages, lets_answer=True)
        check_shows_images(text, self.image_token, len(conversation.images))
        return text

    def count_tokens(
        self, texts: Sequence[Rendered], sizes: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[int, list[int]]]:
        """Per text with images of these sizes: its tokens, and the ids of its labels."""
        expanded = [self._expand(*row) for row in zip(texts, sizes, strict=True)]
        encoded = self.processor.tokenizer(
            [text for text, _ in expanded], return_offsets_mapping=True, verbose=False,
            add_special_tokens=self._adds_special(texts[0].text),
        )  # fmt: skip
        result = []
        rows = zip(encoded["input_ids"], encoded[_PLACES], texts, expanded, strict=True)
        for ids, places, rendered, (_, expansions) in rows:
            is_label = find_labels(places, rendered.spans, expansions)
            result.append((len(ids), [int(n) for n in np.asarray(ids)[is_label]]))
        return result

    def encode(
        self, texts: Sequence[str], images: Sequence[Sequence[Any]], side: str
    ) -> tuple[Batch, list[list[tuple[int, int]]], list[list[Expansion]]]:
        """The processor's whole output, the characters of each token, and what was expanded."""
        from transformers import BatchFeature

        output = self.processor(
            text=list(texts), images=[list(row) for row in images] if any(images) else None,
            padding=True, padding_side=side, add_special_tokens=self._adds_special(texts[0]),
            return_offsets_mapping=True, return_text_replacement_offsets=True,
        )  # fmt: skip
        data = dict(output)
        places = np.asarray(data.pop(_PLACES)).tolist()
        expansions = _read_expansions(data.pop(_OFFSETS, ()), len(texts))
        first = {name: data.pop(name) for name in ("input_ids", "attention_mask")}
        return dict(BatchFeature({**first, **data}, tensor_type="pt")), places, expansions

    def _adds_special(self, text: str) -> bool:
        """As transformers does it in ``processor.apply_chat_template``."""
        begin = self.processor.tokenizer.bos_token
        return begin is None or not text.startswith(begin)

    def _expand(
        self, rendered: Rendered, sizes: Sequence[tuple[int, int]]
    ) -> tuple[str, list[Expansion]]:
        pieces = rendered.text.split(self.image_token)
        text, place, expansions = pieces[0], len(pieces[0]), []
        for size, piece in zip(sizes, pieces[1:], strict=True):
            inserted = self._get_inserted(size)
            before = (place, place + len(self.image_token))
            expansions.append(Expansion(before, (len(text), len(text) + len(inserted))))
            text += inserted + piece
            place = before[1] + len(piece)
        return text, expansions

    def _get_inserted(self, size: tuple[int, int]) -> str:
        if size not in self._inserted:
            from PIL import Image

            output = self.processor(
                text=[self.image_token], images=[[Image.new("RGB", size)]],
                return_text_replacement_offsets=True,
            )  # fmt: skip
            if not output.get(_OFFSETS):
                raise ModelError(
                    f"{type(self.processor).__name__} does not say what it puts in place of an "
                    "image (text_replacement_offsets), so answers cannot be found after one: "
                    "choose another model."
                )
            inserted = output[_OFFSETS][0][0]["replacement"]
            if list(output["input_ids"][0]) != self.processor.tokenizer(inserted)["input_ids"]:
                raise ModelError(
                    f"{type(self.processor).__name__} changes the text around an image, so answers "
                    "cannot be found in it: choose another model, or train this one in a script of "
                    "your own."
                )
            self._inserted[size] = inserted
        return self._inserted[size]


def find_labels(
    places: Sequence[tuple[int, int]], spans: Sequence[Span], expansions: Sequence[Expansion]
) -> Any:
    """Which tokens are labels: those of the answers, but not a row's first, nor of an image."""
    moved = [(_move(start, expansions), _move(end, expansions)) for start, end in spans]
    inside = np.asarray(mark_tokens(list(places), [expansion.after for expansion in expansions]))
    is_label = np.asarray(mark_tokens(list(places), moved)) & ~inside
    is_label[:1] = False
    return is_label


def _move(place: int, expansions: Sequence[Expansion]) -> int:
    """Where a character is after the images before it were expanded."""
    gained = [after[1] - before[1] for before, after in expansions if before[1] <= place]
    return place + (gained[-1] if gained else 0)


def _read_expansions(offsets: Sequence[Sequence[Mapping[str, Any]]], count: int) -> Any:
    if not offsets:  # a batch without images
        return [[]] * count
    return [[Expansion(item["span"], item["new_span"]) for item in row] for row in offsets]


@dataclass(frozen=True)
class AnswerCollator:
    """A batch of conversations with labels on their answers, padded on the right.

    All ranks must run the same parts of a model, its tower too. So a batch without images gets a
    blank one after the end of a row, where nothing reads it: tokens see only those before them.
    """

    encoder: ImageEncoder
    shows_images: bool
    """Whether there are any in the split."""

    def __call__(self, rows: list[Any]) -> Batch:
        import torch

        rendered = [self._render(row) for row in rows]
        texts, images = [row.text for row in rendered], [row["images"] for row in rows]
        if self.shows_images and not any(images):
            from PIL import Image

            shortest = min(range(len(rows)), key=lambda number: len(texts[number]))
            texts[shortest] += self.encoder.image_token
            images[shortest] = [Image.new("RGB", _BLANK)]
        batch, places, expansions = self.encoder.encode(texts, images, "right")
        is_label = torch.from_numpy(np.stack([
            find_labels(*row)
            for row in zip(places, [row.spans for row in rendered], expansions, strict=True)
        ]))  # fmt: skip
        is_label &= batch["attention_mask"] > 0
        labels = batch["input_ids"].masked_fill(~is_label, IGNORED_LABEL)
        first = {name: batch.pop(name) for name in ("input_ids", "attention_mask")}
        return {**first, "labels": labels, **batch}

    def _render(self, row: Mapping[str, Any]) -> Rendered:
        if isinstance(row, LeftOut):
            return Rendered(self.encoder.render_question(row["conversation"]), [])
        rendered = self.encoder.render(row["conversation"])
        assert isinstance(rendered, Rendered), rendered  # rows without answers were left out
        return rendered


@dataclass(frozen=True)
class QuestionCollator:
    """A batch of conversations to be answered, padded on the left."""

    encoder: ImageEncoder

    def __call__(self, rows: list[Any]) -> Batch:
        texts = []
        for row in rows:
            try:
                texts.append(self.encoder.render_question(row["conversation"]))
            except BadRowError as reason:
                raise DataError(f"{row['place']} {reason}.") from None
        return self.encoder.encode(texts, [row["images"] for row in rows], "left")[0]


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
