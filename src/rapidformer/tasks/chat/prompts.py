"""Build the inputs of `rapidformer predict` for causal language models: texts or questions.

A bare text is a prompt for a model with a chat template, and continued by any other. An answer that
a row already has is removed, and shown next to the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.task_sections import DataArguments, GenerationArguments
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.log import get_logger, warn
from rapidformer.tasks.base import Row
from rapidformer.tasks.chat.columns import ChatColumns
from rapidformer.tasks.chat.features import ChatEncoder, build_encoder, tokenize_prompts
from rapidformer.tasks.chat.turns import BadRowError, ChatRows, Message, name_rows, split_answer
from rapidformer.tasks.rows.rows import get_column, map_rows
from rapidformer.tasks.text.text import tokenize


def name_column(rows: Sequence[Row], tokenizer: Any, args: DataArguments) -> str:
    """The column that bare texts stand for: a prompt to answer, or a text to continue."""
    column = args.prompt_column or args.text_column
    if column is not None or not isinstance(rows[0] if rows else None, str):
        return column or "text"
    template = args.chat_template or tokenizer.chat_template
    if template is None or template == "none":
        return "text"
    get_logger().info(
        "texts are answered through the chat template; with --chat-template none, they are "
        "continued as they are"
    )
    return "prompt"


def build_system(args: GenerationArguments) -> list[Message]:
    """The system message of --system-prompt, or nothing."""
    return [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []


def encode_beginnings(
    table: list[dict[str, Any]], column: str, tokenizer: Any, length: int, args: Settings
) -> tuple[Any, dict[str, Any]]:
    """Encode texts to be continued as they are."""
    _check_has_turns(args)
    # A prompt that is too long is cut at the beginning: the continuation depends on its end.
    tokenizer.truncation_side = "left"

    def encode(columns: dict[str, list[Any]], _: list[int]) -> dict[str, list[Any]]:
        encoded = tokenizer(
            columns[column], truncation=True, max_length=length, add_special_tokens=False
        )
        start = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else 0]
        ids = [list(row) or start for row in encoded["input_ids"]]
        return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}

    shown = [{"text": text} for text in get_column(table, column)]
    extras = {"shown": shown, "expected": [None] * len(shown), "is_answer": False}
    return map_rows(table, encode, workers=None, key=()), extras


def encode_questions(
    table: list[dict[str, Any]],
    columns: ChatColumns,
    tokenizer: Any,
    length: int,
    args: Settings,
    split: str = "input",
) -> tuple[Any, dict[str, Any]]:
    """Encode conversations and prompts to be answered."""
    encoder = build_encoder(tokenizer, columns, args, length)
    if encoder.template is None:
        _check_has_turns(args)
    system = build_system(args)
    shown, expected = _read_questions(table, columns, split)

    def encode(part: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        return _encode_prompts(ChatRows(part, indices, split, columns), encoder, system)

    extras = {"shown": shown, "expected": expected, "is_answer": True}
    extras["stop_id"] = encoder.get_stop_id()
    return map_rows(table, encode, workers=None, key=()), extras


def _check_has_turns(args: GenerationArguments) -> None:
    if args.system_prompt is not None:
        raise ConfigurationError(
            "--system-prompt needs a chat template, and these texts are continued as they are: "
            "give --chat-template FILE, or write it into the texts."
        )


def _encode_prompts(
    chats: ChatRows, encoder: ChatEncoder, system: list[Message]
) -> dict[str, list[Any]]:
    """Tokens up to where the answer begins; a prompt that is too long is cut at the beginning."""
    if encoder.template is None:
        ids = tokenize_prompts(chats.read_prompts(), encoder.tokenizer)
    else:
        texts = []
        rows = zip(chats.indices, chats.read_turns(), chats.read_tools(), strict=True)
        for number, messages, tools in rows:
            template = encoder.template.with_tools(tools)
            turns = split_answer(messages)[0]
            if not turns or turns[0]["role"] != "system":
                turns = [*system, *turns]
            try:
                texts.append(template.render(turns, lets_answer=True))
            except BadRowError as reason:
                raise DataError(f"{chats.split}, row {number + 1} {reason}.") from None
        ids = tokenize(texts, encoder.tokenizer)
    numbered = zip(chats.indices, ids, strict=True)
    too_long = [number + 1 for number, row in numbered if len(row) > encoder.length]
    if too_long:
        warn(
            "%s, %s: longer than %d tokens, which leaves no room for the answer: the beginning is "
            "cut off",
            chats.split, name_rows(too_long), encoder.length,
        )  # fmt: skip
    start = encoder.tokenizer.bos_token_id or 0
    kept = [row[-encoder.length :] or [start] for row in ids]
    return {"input_ids": kept, "attention_mask": [[1] * len(row) for row in kept]}


def _read_questions(
    table: list[dict[str, Any]], columns: ChatColumns, split: str
) -> tuple[list[dict[str, Any]], list[str | None]]:
    """The questions, as shown next to the answers, and the answers already in the rows."""
    names = (columns.messages,) if not columns.is_pair else (
        columns.system, columns.prompt, columns.context,
    )  # fmt: skip
    shown = [{name: row.get(name) for name in names if name is not None} for row in table]
    if columns.is_pair:
        return shown, [row.get(str(columns.response)) for row in table]
    values = {str(columns.messages): [row.get(str(columns.messages)) for row in table]}
    turns = ChatRows(values, range(len(table)), split, columns).read_turns()
    questions = [split_answer(messages) for messages in turns]
    return [{str(columns.messages): asked} for asked, _ in questions], [a for _, a in questions]
