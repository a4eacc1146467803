"""Load what the task needs, check all rows, and put splits together for training or prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from rapidformer.config import Settings
from rapidformer.errors import DataError, ModelError
from rapidformer.log import warn_once
from rapidformer.models.build import load_processor
from rapidformer.models.configuration import load_config
from rapidformer.models.location import get_model_location
from rapidformer.tasks.base import PreparedData, Record, Tables
from rapidformer.tasks.chat.columns import ChatColumns
from rapidformer.tasks.chat.features import ChatEncoder
from rapidformer.tasks.chat.prompts import build_system
from rapidformer.tasks.chat.template import choose_template
from rapidformer.tasks.chat.turns import BadRowError, name_rows
from rapidformer.tasks.evaluation.generating import Generation, check_stop_strings, divide_length
from rapidformer.tasks.image_text.conversations import read_conversation
from rapidformer.tasks.image_text.encoding import (
    AnswerCollator,
    ImageEncoder,
    ImageTemplate,
    QuestionCollator,
    Rendered,
    get_image_token,
)
from rapidformer.tasks.image_text.rows import ImageTextRows, ImageTextStream, measure_rows
from rapidformer.tasks.rows.named_files import list_folders, measure_image
from rapidformer.tasks.rows.rows import has_columns, is_row_stream
from rapidformer.tasks.text.text import check_vocabulary, get_context_length, get_max_length

_DEFAULT_LENGTH = 2048
_DEFAULT_NEW_TOKENS = 256


def prepare_answers(
    parts: ImageParts, tables: Tables, columns: ChatColumns, image_column: str | None
) -> PreparedData:
    """Conversations to learn from."""
    args, encoder = parts.args, parts.encoder
    chat = ChatEncoder(
        encoder.processor.tokenizer, columns, encoder.template, parts.length, args.train_on_prompts
    )
    features: dict[str, Any] = {}
    has_images = has_stream = False
    for split, table in tables.items():
        rows = ImageTextRows(table, split, columns, image_column, list_folders(args, split))
        is_labelled = has_columns(table, split, columns.get_names())
        if is_row_stream(table):
            stream = ImageTextStream(rows, encoder, chat)
            features[split], has_stream = stream.open(), True
            has_images |= stream.report()
            continue
        measured = measure_rows(rows, encoder, chat) if is_labelled else None
        features[split] = measured and replace(
            rows, numbers=measured.numbers, lengths=measured.lengths
        )
        has_images |= measured is not None and measured.has_images
    if not has_images:
        hint = "" if image_column else " and no column of them was found (--image-column)"
        warn_once(f"no row has an image{hint}: the model learns from text alone.")
    extras = {
        "stop_id": chat.get_stop_id(),
        "labelled": {split: rows is not None for split, rows in features.items()},
        "placeholders": parts.get_placeholders(),
    }  # fmt: skip
    collate = AnswerCollator(encoder, has_images or has_stream)
    return PreparedData(**features, collate=collate, extras=extras, **parts.get_processors())


def prepare_questions(
    parts: ImageParts, table: list[Record], columns: ChatColumns, image_column: str | None
) -> PreparedData:
    """Conversations to be answered."""
    args, tokenizer, limit = parts.args, parts.encoder.processor.tokenizer, parts.length
    if args.seq_length is None:
        limit = get_context_length(tokenizer, parts.config)
    length, new_tokens = divide_length(limit, args, _DEFAULT_NEW_TOKENS)
    generation = Generation.read(args, max_new_tokens=new_tokens)
    check_stop_strings(generation, tokenizer)
    questions = ImageTextRows(
        table, "input", columns, image_column, list_folders(args, "test"), range(len(table)),
        is_asked=True, system=build_system(args),
    )  # fmt: skip
    shown, expected = _check_questions(questions, parts.encoder, length)
    extras = {
        "generation": generation, "prompt_length": length, "is_answer": True,
        "labelled": {"test": False}, "shown": shown, "expected": expected,
        "stop_id": parts.encoder.template.get_stop_id(),
    }  # fmt: skip
    collate = QuestionCollator(parts.encoder)
    return PreparedData(test=questions, collate=collate, extras=extras, **parts.get_processors())


class ImageParts(NamedTuple):
    """What every split needs."""

    config: Any
    """That of the language model."""
    encoder: ImageEncoder
    length: int
    args: Settings

    def get_processors(self) -> dict[str, Any]:
        processor = self.encoder.processor
        return {"processor": processor.tokenizer, "saved": processor}

    def get_placeholders(self) -> frozenset[int]:
        """The tokens that stand for images."""
        processor = self.encoder.processor
        token = processor.tokenizer.convert_tokens_to_ids(self.encoder.image_token)
        return frozenset({token, *processor.image_token_ids})


def load_image_parts(args: Settings) -> ImageParts:
    whole = load_config(args)
    name = f"{get_model_location(args) or whole.model_type} ({whole.model_type})"
    if getattr(whole, "vision_config", None) is None:
        raise ModelError(
            f"{name} reads no images, "
            "and --task image_text is for models that do: choose one of those, or --task causal_lm."
        )
    if whole.is_encoder_decoder:  # Florence-2
        raise ModelError(
            f"{name} answers with a decoder of its own, and --task image_text is for models that "
            "continue the conversation: choose one of those, or train it in a script of your own."
        )
    config, processor = whole.get_text_config(), load_processor(args)
    tokenizer = processor.tokenizer
    check_vocabulary(tokenizer, config.vocab_size)
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    template = choose_template(
        tokenizer, args.chat_template, json.loads(args.chat_template_kwargs or "{}"),
        needs_one=True, build=partial(ImageTemplate, image_token=get_image_token(processor)),
    )  # fmt: skip
    assert template is not None
    processor.chat_template = tokenizer.chat_template
    length = get_max_length(args, tokenizer, config, _DEFAULT_LENGTH)
    encoder = ImageEncoder(processor, template, args.train_on_prompts)
    return ImageParts(config, encoder, length, args)


def _check_questions(
    rows: ImageTextRows, encoder: ImageEncoder, limit: int
) -> tuple[list[dict[str, Any]], list[str | None]]:
    """Questions as shown next to the answers, and known answers; refuses rows that are too long."""
    shown, expected, too_long = [], [], []
    for number in range(len(rows)):
        place = rows.name_row(number)
        try:
            asked = rows.read(number)
            text = encoder.render_question(asked)
            known = read_conversation(rows.rows[number], rows.columns, rows.image_column)
        except BadRowError as reason:
            raise DataError(f"{place}: it {reason}.") from None
        sizes = [measure_image(image, place, rows.folders) for image in asked.images]
        ((length, _),) = encoder.count_tokens([Rendered(text, [])], [sizes])
        too_long += [number + 1] * (length > limit)
        names = [name for name in rows.columns.get_names() if name != rows.columns.response]
        shown.append({name: rows.rows[number].get(name) for name in names})
        expected.append(known.split_answer()[1] or None)
    if too_long:
        raise DataError(
            f"input, {name_rows(too_long)}: longer than {limit} tokens with the images, which "
            "leaves no room for the answer, and images cannot be cut: use smaller images, a longer "
            "--seq-length or fewer --max-new-tokens."
        )
    return shown, expected
