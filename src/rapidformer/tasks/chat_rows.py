"""Rows of a table as conversations or prompts; what is wrong with them is told by row number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rapidformer.errors import DataError
from rapidformer.tasks.base import check_row_texts
from rapidformer.tasks.conversations import (
    BadRowError,
    ChatColumns,
    Message,
    build_messages,
    join_prompt,
    read_messages,
)

_SHOWN_ROWS = 5


def read_turns(
    columns: dict[str, list[Any]], indices: Sequence[int], split: str, names: ChatColumns
) -> list[list[Message]]:
    """The turns of each row; every row that has none is named, with the reason."""
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
        told = [
            f"{split}, {name_rows(rows)}: the column {names.messages} {reason}."
            for reason, rows in problems.items()
        ]
        raise DataError(" ".join(told))
    return turns


def read_prompts(
    columns: dict[str, list[Any]], indices: Sequence[int], split: str, names: ChatColumns
) -> list[str]:
    """Prompts without a template: system message, prompt and context, one under the other."""
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
