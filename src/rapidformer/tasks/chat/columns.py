"""Find the columns that hold a conversation, or a prompt and its answer.

A table with a text column is plain text even if it also has a prompt and an answer (Alpaca's files
have all three). Only a column of turns, or a flag, takes precedence over the text column.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.log import get_logger
from rapidformer.tasks.rows.columns import (
    ColumnRole,
    as_optional,
    check_given,
    find_column,
    find_columns,
)
from rapidformer.tasks.rows.rows import get_column_names

_SHOWN = 60
"""Characters of a value that a message shows."""
# Tried in this order.
PAIRS: tuple[tuple[str, str], ...] = (
    ("prompt", "response"), ("prompt", "completion"), ("instruction", "output"),
    ("instruction", "response"), ("question", "answer"), ("question", "response"),
    ("query", "response"), ("query", "answer"), ("problem", "solution"), ("input", "output"),
)  # fmt: skip
MESSAGES = ColumnRole(
    "messages", "messages_column",
    "the turns: [{role, content}, ...], or ShareGPT's [{from, value}, ...]",
    ("messages", "conversations", "conversation", "turns", "dialog", "chat"), required=False,
)  # fmt: skip
PROMPT = ColumnRole(
    "prompt", "prompt_column", "the prompt", tuple(dict.fromkeys(first for first, _ in PAIRS))
)
RESPONSE = ColumnRole(
    "response", "response_column", "the answer to the prompt",
    tuple(dict.fromkeys(second for _, second in PAIRS)),
)  # fmt: skip
CONTEXT = ColumnRole(
    "context", "context_column", "a continuation of the prompt (Alpaca's input)",
    ("input", "context"), required=False,
)  # fmt: skip
SYSTEM = ColumnRole(
    "system", "system_column", "the system message of a prompt", ("system", "system_prompt"),
    required=False,
)  # fmt: skip
TOOLS = ColumnRole(
    "tools", "tools_column", "the tools that the model may call, as JSON schemas", ("tools",),
    required=False,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChatColumns:
    """The columns of the turns: one column of messages, or a prompt and an answer column."""

    messages: str | None = None
    prompt: str | None = None
    response: str | None = None
    context: str | None = None
    system: str | None = None
    tools: str | None = None
    """Of conversations only."""

    @property
    def is_pair(self) -> bool:
        return self.messages is None

    def get_names(self) -> list[str]:
        names = (getattr(self, f.name) for f in fields(self))
        return [name for name in names if name is not None]


def find_chat_columns(
    rows: Any, args: DataArguments, text: ColumnRole, *, has_answers: bool
) -> ChatColumns | None:
    """The columns of conversations; None if the data is plain text."""
    available = get_column_names(rows)
    _check_one_kind(args)
    if args.text_column is not None:
        return None
    if args.prompt_column is not None or args.response_column is not None:
        return _find_pair(available, args, has_answers)
    by_lower = {name.lower(): name for name in available}
    likely = [by_lower[name] for name in MESSAGES.candidates if name in by_lower]
    if args.messages_column is not None:
        turns: str | None = check_given(args.messages_column, MESSAGES.flag, available)
        if (value := _find_first(rows, args.messages_column)) and not _are_turns(value):
            raise DataError(_describe_no_turns(args.messages_column, value))
    else:
        turns = next((name for name in likely if holds_turns(rows, name)), None)
    if turns is not None:
        tools = find_column(TOOLS, available, args, taken=[turns])
        return ChatColumns(messages=turns, tools=tools)
    pairs = ([by_lower.get(name) for name in names] for names in PAIRS)
    prompt, response = next((pair for pair in pairs if None not in pair), (None, None))
    if prompt is None and not has_answers:
        prompt = find_column(as_optional(PROMPT), available, args)
    try:
        column = find_column(text if prompt is None else as_optional(text), available, args)
    except DataError as error:
        if {"chosen", "rejected"} <= by_lower.keys():
            raise DataError(_describe_preferences(rows, by_lower)) from None
        if likely and (value := _find_first(rows, likely[0])) is not None:
            raise DataError(_describe_no_turns(likely[0], value)) from None
        raise DataError(
            f"{error} For conversations, give --messages-column; for prompts and answers, "
            "--prompt-column and --response-column."
        ) from None
    if prompt is not None and column is None:
        return _with_extras(prompt, response, available, args)
    if prompt is not None and has_answers:
        get_logger().info(
            "the data is read as plain text; use --prompt-column %s --response-column %s to train "
            "only on the answers.",
            prompt, response,
        )  # fmt: skip
    return None


def _describe_preferences(rows: Any, by_lower: Mapping[str, str]) -> str:
    chosen, prompt = by_lower["chosen"], by_lower.get("prompt")
    if holds_turns(rows, chosen):
        flags = f"--messages-column {shlex.quote(chosen)}, if its turns begin with the prompt"
    elif prompt is not None:
        flags = f"--prompt-column {shlex.quote(prompt)} --response-column {shlex.quote(chosen)}"
    else:
        flags = f"--text-column {shlex.quote(chosen)}"
    return (
        "The data holds preferences (chosen and rejected answers), which --task preference learns: "
        f"to train on the chosen ones alone, give {flags}."
    )


def _check_one_kind(args: DataArguments) -> None:
    flags = [
        f"{role.flag} {getattr(args, role.setting)}"
        for role in (MESSAGES, PROMPT, RESPONSE)
        if getattr(args, role.setting) is not None
    ]
    if args.text_column is not None:
        flags.append(f"--text-column {args.text_column}")
    is_pair_alone = args.messages_column is None and args.text_column is None
    if len(flags) > 1 and not is_pair_alone:
        raise ConfigurationError(
            f"{' and '.join(flags)} cannot be combined: give --messages-column (conversations), "
            "--prompt-column and --response-column, or --text-column."
        )


def _find_pair(available: Sequence[str], args: DataArguments, has_answers: bool) -> ChatColumns:
    if has_answers:
        columns = find_columns((PROMPT, RESPONSE), available, args)
        return _with_extras(columns["prompt"], columns["response"], available, args)
    # Answers, if there are any, are shown next to the predicted ones.
    prompt = find_columns((PROMPT,), available, args)["prompt"]
    response = args.response_column if args.response_column in available else None
    if args.response_column is None:
        response = find_column(as_optional(RESPONSE), available, args, taken=[prompt])
    return _with_extras(prompt, response, available, args)


def _with_extras(
    prompt: str, response: str | None, available: Sequence[str], args: DataArguments
) -> ChatColumns:
    taken = [prompt, response]
    return ChatColumns(
        prompt=prompt, response=response, context=find_column(CONTEXT, available, args, taken),
        system=find_column(SYSTEM, available, args, taken),
    )  # fmt: skip


def holds_turns(rows: Any, name: str) -> bool:
    """Whether a column has messages in it, not texts."""
    return _are_turns(_find_first(rows, name))


def _find_first(rows: Any, name: str) -> Any:
    """The first value of a column that is not empty; None without one."""
    # Lists of a DataFrame are arrays, which are neither true nor false.
    values = (row.get(name) for row in rows)
    return next((v for v in values if v is not None and getattr(v, "__len__", lambda: 1)()), None)


def _are_turns(value: Any) -> bool:
    if isinstance(value, str):  # as JSON
        return "".join(value[:20].split()).startswith("[{")
    return isinstance(value, Sequence) and isinstance(value[0], Mapping)


def _describe_no_turns(name: str, value: Any) -> str:
    shown = repr(value) if len(repr(value)) <= _SHOWN else f"{repr(value)[:_SHOWN]} ..."
    hint = f" To train on it as plain text, give --text-column {shlex.quote(name)}."
    return (
        f"The column {name} holds {shown}, not the turns of conversations, such as "
        '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}].'
        f"{hint if isinstance(value, str) else ''}"
    )
