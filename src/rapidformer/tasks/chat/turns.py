"""Read rows as conversations or prompts, in any usual format; errors name the row by its number."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rapidformer.errors import DataError, list_some
from rapidformer.tasks.base import check_row_texts
from rapidformer.tasks.chat.columns import ChatColumns

Message = dict[str, Any]
_Cell = TypeVar("_Cell")
_SHOWN_ROWS = 5
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}


class BadRowError(Exception):
    """A row that is not a conversation; the caller adds the row number."""


class ChatRows(NamedTuple):
    """Some rows of a split, with their numbers in it."""

    columns: dict[str, list[Any]]
    indices: Sequence[int]
    split: str
    names: ChatColumns

    def read_turns(self) -> list[list[Message]]:
        """The turns of each row; the error names every bad row and the reason."""
        if self.names.messages is not None:
            return self._read_cells(self.names.messages, read_messages)
        prompts = self._read_prompts()
        answers: Sequence[str | None] = [None] * len(self.indices)
        if self.names.response is not None:
            answers = self.read_texts(self.names.response)
        contexts, systems = map(self.read_texts, (self.names.context, self.names.system))
        return [build_turns(*row) for row in zip(systems, prompts, contexts, answers, strict=True)]

    def read_tools(self) -> list[list[Any] | None]:
        """The tools that each row's conversation may call; None for rows without any."""
        if self.names.tools is None:
            return [None] * len(self.indices)
        return self._read_cells(self.names.tools, _read_schemas)

    def _read_cells(self, column: str, read: Callable[[Any], _Cell]) -> list[_Cell]:
        cells: list[_Cell] = []
        problems: dict[str, list[int]] = defaultdict(list)
        for number, value in zip(self.indices, self.columns[column], strict=True):
            try:
                cells.append(read(value))
            except BadRowError as reason:
                problems[str(reason)].append(number + 1)
        if problems:
            messages = [
                f"{self.split}, {name_rows(rows)}: the column {column} {reason}."
                for reason, rows in problems.items()
            ]
            raise DataError(" ".join(messages))
        return cells

    def read_prompts(self) -> list[str]:
        """Prompts without a template: system message, prompt, context, and blank lines between."""
        prompts = self._read_prompts()
        if self.names.context is None and self.names.system is None:
            return prompts
        contexts, systems = map(self.read_texts, (self.names.context, self.names.system))
        return [join_prompt(*parts) for parts in zip(systems, prompts, contexts, strict=True)]

    def _read_prompts(self) -> list[str]:
        name = str(self.names.prompt)
        return check_row_texts(self.columns[name], name, self.split, self.indices[0])

    def read_texts(self, name: str | None) -> list[str]:
        """The texts of a column that may be missing or have empty cells."""
        if name is None:
            return [""] * len(self.indices)
        values = ["" if value is None else value for value in self.columns[name]]
        return check_row_texts(values, name, self.split, self.indices[0])


def _read_schemas(value: Any) -> list[Any] | None:
    """Some data sets store the list, or each schema in it, as JSON text."""
    try:
        listed = json.loads(value or "null") if isinstance(value, str) else value
        schemas = [json.loads(item) if isinstance(item, str) else item for item in listed or ()]
    except (ValueError, TypeError):
        schemas = [None]
    if not all(isinstance(schema, Mapping) for schema in schemas):
        raise BadRowError("must hold a list of JSON schemas; rename it if it holds something else")
    return _drop_absent(schemas) or None


def _drop_absent(value: Any) -> Any:
    """Tables on disk give every schema the keys of all schemas, with None for the missing ones."""
    if isinstance(value, Mapping):
        return {key: _drop_absent(item) for key, item in value.items() if item is not None}
    return [_drop_absent(item) for item in value] if isinstance(value, list) else value


def name_rows(numbers: Sequence[int]) -> str:
    numbers = list(dict.fromkeys(numbers))
    if len(numbers) == 1:
        return f"row {numbers[0]}"
    return f"rows {list_some(list(map(str, numbers)), _SHOWN_ROWS)}"


def read_messages(value: Any, read_content: Callable[[Any], str] | None = None) -> list[Message]:
    """The turns of a conversation, with our role names; raises BadRowError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRowError("must hold a list of messages, not a plain string") from None
    if not isinstance(value, Sequence) or isinstance(value, str):
        actual = "nothing" if value is None else f"a {type(value).__name__}"
        raise BadRowError(f"must hold a list of messages, not {actual}")
    return [_read_message(item, read_content or _read_content) for item in value]


def build_turns(system: str, prompt: str, context: str, answer: str | None) -> list[Message]:
    """A prompt and its answer as turns."""
    turns = [{"role": "system", "content": system}] if system.strip() else []
    turns.append({"role": "user", "content": join_prompt(prompt, context)})
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    return turns


def join_prompt(*parts: str) -> str:
    """The non-empty parts of a prompt, separated by blank lines."""
    return "\n\n".join(part for part in parts if part.strip())


def is_empty(message: Message) -> bool:
    """Whether a turn says nothing; a tool call counts as something."""
    return not message["content"].strip() and not message.get("tool_calls")


def find_last_answer(messages: Sequence[Message]) -> int:
    """Where the turns end that decide a loss: after the last answer; 0 without one."""
    places = enumerate(messages, start=1)
    return max((n for n, m in places if m["role"] == "assistant" and not is_empty(m)), default=0)


def split_answer(messages: list[Message]) -> tuple[list[Message], str | None]:
    """The turns up to the requested answer, and that answer if the row has it."""
    if messages and messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]["content"]
    return messages, None


def _read_message(item: Any, read_content: Callable[[Any], str]) -> Message:
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
    return {**values, "role": known, "content": read_content(content)}


def _read_content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        if all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
        if other := {str(part.get("type")) for part in content} - {"None", "text"}:
            raise BadRowError(
                f"has a message with a part of type {' and '.join(sorted(other))}, and this task "
                "reads text alone: --task image_text reads images"
            )
    raise BadRowError("has a message whose content is not text")
