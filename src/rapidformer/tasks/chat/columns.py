"""Find the columns that hold a conversation, or a prompt and its answer.

A table with a text column is plain text even if it also has a prompt and an answer (Alpaca's files
have all three). Only a column of turns, or a flag, takes precedence over the text column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rapidformer.config import Settings
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.log import get_logger
from rapidformer.tasks.rows.columns import ColumnRole, check_given, find_column, find_columns
from rapidformer.tasks.rows.rows import get_column_names

# Tried in this order.
PAIRS: tuple[tuple[str, str], ...] = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("input", "output"),
)
MESSAGES = ColumnRole(
    name="messages",
    candidates=("messages", "conversations", "conversation", "turns", "dialog", "chat"),
    holds="the turns: [{role, content}, ...], or ShareGPT's [{from, value}, ...]",
    setting="messages_column",
    required=False,
)
PROMPT = ColumnRole(
    name="prompt",
    candidates=tuple(dict.fromkeys(first for first, _ in PAIRS)),
    holds="the prompt",
    setting="prompt_column",
)
RESPONSE = ColumnRole(
    name="response",
    candidates=tuple(dict.fromkeys(second for _, second in PAIRS)),
    holds="the answer to the prompt",
    setting="response_column",
)
CONTEXT = ColumnRole(
    name="context",
    candidates=("input", "context"),
    holds="a continuation of the prompt (Alpaca's input)",
    setting="context_column",
    required=False,
)
SYSTEM = ColumnRole(
    name="system",
    candidates=("system", "system_prompt"),
    holds="the system message of a prompt",
    setting="system_column",
    required=False,
)
TOOLS = ColumnRole(
    name="tools",
    candidates=("tools",),
    holds="the tools that the model may call, as JSON schemas",
    setting="tools_column",
    required=False,
)


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The settings for conversations; arguments from an older script may lack them."""

    text_column: str | None = None
    messages_column: str | None = None
    prompt_column: str | None = None
    response_column: str | None = None
    context_column: str | None = None
    system_column: str | None = None
    tools_column: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: str | None = None
    train_on_prompts: bool = False
    packing: bool = False

    @classmethod
    def read(cls, args: Settings) -> ChatSettings:
        values: dict[str, Any] = {f.name: getattr(args, f.name, f.default) for f in fields(cls)}
        return cls(**values)


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
        names = (
            self.messages, self.prompt, self.response, self.context, self.system, self.tools,
        )  # fmt: skip
        return [name for name in names if name is not None]


def as_optional(role: ColumnRole) -> ColumnRole:
    """The same role, made optional."""
    return replace(role, required=False)


def find_chat_columns(
    rows: Any, settings: ChatSettings, text: ColumnRole, *, has_answers: bool
) -> ChatColumns | None:
    """The columns of conversations; None if the data is plain text."""
    available = get_column_names(rows)
    _check_one_kind(settings)
    if settings.text_column is not None:
        return None
    if settings.messages_column is not None:
        column = check_given(settings.messages_column, MESSAGES.flag, available)
        return _name_conversations(column, available, settings)
    if settings.prompt_column is not None or settings.response_column is not None:
        return _find_pair(available, settings, has_answers)
    by_lower = {name.lower(): name for name in available}
    likely = [by_lower[name] for name in MESSAGES.candidates if name in by_lower]
    turns = next((name for name in likely if _holds_turns(rows, name)), None)
    if turns is not None:
        return _name_conversations(turns, available, settings)
    pair = _find_known_pair(available, settings, has_answers)
    if find_column(as_optional(text), available, settings) is not None:
        if pair is not None and has_answers:
            get_logger().info(
                "the data is read as plain text; use --prompt-column %s --response-column %s to "
                "train only on the answers.",
                pair.prompt,
                pair.response,
            )
        return None
    if pair is None:
        _refuse(text, available, settings)
    return pair


def _name_conversations(
    messages: str, available: Sequence[str], settings: ChatSettings
) -> ChatColumns:
    tools = find_column(TOOLS, available, settings, taken=[messages])
    return ChatColumns(messages=messages, tools=tools)


def _check_one_kind(settings: ChatSettings) -> None:
    names = [
        f"{role.flag} {getattr(settings, role.setting)}"
        for role in (MESSAGES, PROMPT, RESPONSE)
        if getattr(settings, role.setting) is not None
    ]
    if settings.text_column is not None:
        names.append(f"--text-column {settings.text_column}")
    is_pair_alone = settings.messages_column is None and settings.text_column is None
    if len(names) > 1 and not is_pair_alone:
        raise ConfigurationError(
            f"{' and '.join(names)} cannot be combined: give --messages-column (conversations), "
            "--prompt-column and --response-column, or --text-column."
        )


def _find_pair(
    available: Sequence[str], settings: ChatSettings, has_answers: bool
) -> ChatColumns | None:
    if not has_answers:
        # Answers, if there are any, are shown next to the predicted ones.
        prompt = find_columns((PROMPT,), available, settings)["prompt"]
        column = settings.response_column
        response = column if column in available else None
        if column is None:
            response = find_column(as_optional(RESPONSE), available, settings, taken=[prompt])
        return _with_extras(prompt, response, available, settings)
    columns = find_columns((PROMPT, RESPONSE), available, settings)
    return _with_extras(columns["prompt"], columns["response"], available, settings)


def _find_known_pair(
    available: Sequence[str], settings: ChatSettings, has_answers: bool
) -> ChatColumns | None:
    by_lower = {name.lower(): name for name in available}
    for prompt, response in PAIRS:
        if prompt in by_lower and response in by_lower:
            return _with_extras(by_lower[prompt], by_lower[response], available, settings)
    if not has_answers:
        column = find_column(as_optional(PROMPT), available, settings)
        if column is not None:
            return _with_extras(column, None, available, settings)
    return None


def _with_extras(
    prompt: str, response: str | None, available: Sequence[str], settings: ChatSettings
) -> ChatColumns:
    taken = [prompt, response]
    return ChatColumns(
        prompt=prompt,
        response=response,
        context=find_column(CONTEXT, available, settings, taken),
        system=find_column(SYSTEM, available, settings, taken),
    )


def _holds_turns(rows: Any, name: str) -> bool:
    first = next((row[name] for row in rows if row.get(name)), None)
    if isinstance(first, str):
        return first.lstrip().startswith("[{")
    return isinstance(first, Sequence) and isinstance(first[0], Mapping)


def _refuse(text: ColumnRole, available: Sequence[str], settings: ChatSettings) -> None:
    try:
        find_column(text, available, settings)
    except DataError as error:
        raise DataError(
            f"{error} For conversations, give --messages-column; for prompts and answers, "
            "--prompt-column and --response-column."
        ) from None
