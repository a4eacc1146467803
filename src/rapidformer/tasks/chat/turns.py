"""Read rows as conversations or prompts: turns with the roles system, user, assistant and tool.

`messages` in the format of OpenAI and Hugging Face, ShareGPT's `conversations`, and prompts with
answers all become a list of turns. Errors name the row by its number.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rapidformer.errors import DataError
from rapidformer.tasks.base import check_row_texts
from rapidformer.tasks.chat.columns import ChatColumns

Message = dict[str, Any]

_SHOWN_ROWS = 5
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}


class BadRowError(Exception):
    """A row that is not a conversation; the caller adds the row number."""


def read_turns(
    columns: dict[str, list[Any]], indices: Sequence[int], split: str, names: ChatColumns
) -> list[list[Message]]:
    """The turns of each row; the error names every bad row and the reason."""
    if names.messages is None:
        prompts = check_row_texts(columns[str(names.prompt)], str(names.prompt), split, indices[0])
        extra = [
            read_optional(columns, indices, split, name)
            for name in (names.response, names.context, names.system)
        ]
        return [
            build_messages(p, response=r if names.response else None, context=c, system=s)
            for p, r, c, s in zip(prompts, *extra, strict=True)
        ]
    turns: list[list[Message]] = []
    problems: dict[str, list[int]] = defaultdict(list)
    for number, value in zip(indices, columns[names.messages], strict=True):
        try:
            turns.append(read_messages(value))
        except BadRowError as reason:
            problems[str(reason)].append(number + 1)
    if problems:
        messages = [
            f"{split}, {name_rows(rows)}: the column {names.messages} {reason}."
            for reason, rows in problems.items()
        ]
        raise DataError(" ".join(messages))
    return turns


def read_tools(
    columns: dict[str, list[Any]], indices: Sequence[int], split: str, names: ChatColumns
) -> list[list[Any] | None]:
    """The tools that each row's conversation may call; None for rows without any."""
    if names.tools is None:
        return [None] * len(indices)
    schemas: list[list[Any] | None] = []
    bad: list[int] = []
    for number, value in zip(indices, columns[names.tools], strict=True):
        try:
            schemas.append(_read_schemas(value))
        except (ValueError, TypeError):
            bad.append(number + 1)
    if bad:
        raise DataError(
            f"{split}, {name_rows(bad)}: the column {names.tools} must hold a list of JSON "
            "schemas; rename it if it holds something else."
        )
    return schemas


def _read_schemas(value: Any) -> list[Any] | None:
    """Some data sets store the list, or each schema in it, as JSON text."""
    listed = json.loads(value or "null") if isinstance(value, str) else value
    schemas = [json.loads(schema) if isinstance(schema, str) else schema for schema in listed or ()]
    if not all(isinstance(schema, Mapping) for schema in schemas):
        raise TypeError("a schema is an object")
    return _drop_absent(schemas) or None


def _drop_absent(value: Any) -> Any:
    """Tables on disk give every schema the keys of all schemas, with None for the missing ones."""
    if isinstance(value, Mapping):
        return {key: _drop_absent(item) for key, item in value.items() if item is not None}
    return [_drop_absent(item) for item in value] if isinstance(value, list) else value


def read_prompts(
    columns: dict[str, list[Any]], indices: Sequence[int], split: str, names: ChatColumns
) -> list[str]:
    """Prompts without a template: system message, prompt and context, separated by blank lines."""
    prompts = check_row_texts(columns[str(names.prompt)], str(names.prompt), split, indices[0])
    if names.context is None and names.system is None:
        return prompts
    contexts = read_optional(columns, indices, split, names.context)
    systems = read_optional(columns, indices, split, names.system)
    return [join_prompt(*parts) for parts in zip(systems, prompts, contexts, strict=True)]


def read_optional(
    columns: dict[str, list[Any]], indices: Sequence[int], split: str, name: str | None
) -> list[str]:
    if name is None:
        return [""] * len(indices)
    values = ["" if value is None else value for value in columns[name]]
    return check_row_texts(values, name, split, indices[0])


def name_rows(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"row {numbers[0]}"
    shown = ", ".join(map(str, numbers[:_SHOWN_ROWS]))
    more = f" and {len(numbers) - _SHOWN_ROWS} more" if len(numbers) > _SHOWN_ROWS else ""
    return f"rows {shown}{more}"


# ---- one conversation --------------------------------------------------------------------------


def read_messages(value: Any) -> list[Message]:
    """The turns of a conversation, with our role names; raises BadRowError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRowError("must hold a list of messages, not a plain string") from None
    if not isinstance(value, Sequence) or isinstance(value, str):
        actual = "nothing" if value is None else f"a {type(value).__name__}"
        raise BadRowError(f"must hold a list of messages, not {actual}")
    return [_read_message(item) for item in value]


def build_messages(
    prompt: str, *, response: str | None = None, context: str = "", system: str = ""
) -> list[Message]:
    """A prompt and its answer as turns."""
    turns = [{"role": "system", "content": system}] if system.strip() else []
    turns.append({"role": "user", "content": join_prompt(prompt, context)})
    if response is not None:
        turns.append({"role": "assistant", "content": response})
    return turns


def join_prompt(*parts: str) -> str:
    """The non-empty parts of a prompt, separated by blank lines."""
    return "\n\n".join(part for part in parts if part.strip())


def is_empty(message: Message) -> bool:
    """Whether a turn says nothing; a tool call counts as something."""
    return not message["content"].strip() and not message.get("tool_calls")


def _read_message(item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise BadRowError(f"has a {type(item).__name__} instead of a message (role, content)")
    # Tables on disk give every message the keys of all messages, with None for the missing ones.
    # An empty list of tool calls means the same; some templates look only whether there is a list.
    values = {
        key: value
        for key, value in item.items()
        if value is not None and not (key == "tool_calls" and not value)
    }
    role = values.pop("role", None) or values.pop("from", None)
    if role is None:
        raise BadRowError(f"has a message without a role (its keys: {', '.join(item)})")
    known = _ROLES.get(str(role).lower())
    if known is None:
        raise BadRowError(
            f"has a message with the unknown role {role!r} (known: {', '.join(_ROLES)})"
        )
    content = next((values.pop(key) for key in ("content", "value") if key in values), "")
    return {**values, "role": known, "content": _read_content(content)}


def _read_content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise BadRowError("has a message whose content is not text")
