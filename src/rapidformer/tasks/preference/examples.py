"""Read rows of preferences: a prompt and its answers, as texts or as turns; errors name the row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rapidformer.errors import DataError
from rapidformer.tasks.chat.turns import BadRowError, Message, is_empty, join_prompt, read_messages
from rapidformer.tasks.preference.columns import PreferenceColumns, parse_turns

_TRUTHS = {"true": True, "false": False, "1": True, "0": False, 1: True, 0: False}


class Example(NamedTuple):
    """A prompt and its answers: the better one first, or a single one."""

    number: int
    """The row's, from 0."""
    prompt: str | list[Message]
    answers: tuple[str | list[Message], ...]
    system: str = ""
    context: str = ""
    tools: Any = None
    variables: Mapping[str, Any] | None = None
    margin: float = 0.0
    is_good: bool | None = None
    """The label of a single answer; of a pair, the first is good."""

    def get_turns(self, answer: int) -> list[Message]:
        """The conversation up to and including an answer; only of examples with turns."""
        prompt = self.prompt
        if isinstance(prompt, str):
            prompt = join_prompt(prompt, self.context)
        turns = [*_as_turns(prompt, "user"), *_as_turns(self.answers[answer], "assistant")]
        if self.system.strip() and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.system})
        return turns

    def count_answers(self, answer: int) -> int:
        """The assistant's turns after the prompt."""
        return _count_answers(self.answers[answer])


def read_examples(
    cells: Mapping[str, Sequence[Any]], indices: Sequence[int], split: str, names: PreferenceColumns
) -> Iterator[Example]:
    """The examples of some rows, of columns of cells."""
    for place, number in enumerate(indices):
        row = {name: values[place] for name, values in cells.items()}
        try:
            yield _read_row(row, number, names)
        except BadRowError as reason:
            raise DataError(f"{split}, row {number + 1}: {reason}.") from None


def _read_row(row: Mapping[str, Any], number: int, names: PreferenceColumns) -> Example:
    read = _read_turns_or_text if names.has_turns else _read_text
    prompt: str | list[Message] = ""
    last: list[Message] = []
    if names.messages is not None:
        prompt = _read_cell(row, names.messages, read_messages)
    elif names.prompt is not None:
        prompt = _read_cell(row, names.prompt, read)
    if None in names.answers:
        prompt, last = _split_last_answer(prompt, names)
    answers = tuple(last if n is None else _read_cell(row, n, read) for n in names.answers)
    if names.is_pair:
        prompt, answers = _find_prompt(prompt, answers, names)
    for name, answer in zip(names.answers, answers, strict=True):
        if not _count_answers(answer):
            raise BadRowError(f"the column {name or names.messages} holds an empty answer")
    return Example(
        number, prompt, answers,
        system=_read_optional(row, names.system), context=_read_optional(row, names.context),
        tools=row.get(names.tools or ""), variables=_read_variables(row, names.variables),
        margin=_read_margin(row, names.margin), is_good=_read_label(row, names.label),
    )  # fmt: skip


def _find_prompt(
    prompt: str | list[Message], answers: tuple[Any, ...], names: PreferenceColumns
) -> tuple[str | list[Message], tuple[str | list[Message], ...]]:
    """The prompt and both answers without it."""
    chosen, rejected = answers
    if all(isinstance(a, list) and a and a[0]["role"] != "assistant" for a in answers):
        # Both repeat the prompt, whether it has a column or not; at least one turn is the answer.
        count = min(_count_common(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        return chosen[:count], (chosen[count:], rejected[count:])
    if names.has_prompt:
        return prompt, answers
    if isinstance(chosen, str) and isinstance(rejected, str):
        end = _find_common_words(chosen, rejected)
        return chosen[:end], (chosen[end:], rejected[end:])
    raise BadRowError(
        f"the columns {names.chosen} and {names.rejected} begin with an answer, and no column has "
        "the prompt"
    )


def _count_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _find_common_words(first: str, second: str) -> int:
    """Where two texts part, cut back to a word; the space before it belongs to the answer."""
    # If one begins with the other, its last word is its answer.
    ends = (len(text.rstrip()) - 1 for text in (first, second))
    place = max(0, min(_count_common(first, second), *ends))
    while place and not first[place - 1].isspace():
        place -= 1
    return place - 1 if place and first[place - 1] == " " else place


def _split_last_answer(
    turns: str | list[Message], names: PreferenceColumns
) -> tuple[list[Message], list[Message]]:
    """The conversation up to the answer that ends it, and that answer."""
    assert isinstance(turns, list)
    if not turns or turns[-1]["role"] != "assistant":
        raise BadRowError(f"the column {names.messages} does not end with an answer")
    return turns[:-1], turns[-1:]


def _as_turns(value: str | list[Message], role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _count_answers(answer: str | list[Message]) -> int:
    turns = _as_turns(answer, "assistant")
    return sum(turn["role"] == "assistant" and not is_empty(turn) for turn in turns)


# ---- cells -------------------------------------------------------------------------------------


def _read_cell(row: Mapping[str, Any], name: str, read: Callable[[Any], Any]) -> Any:
    if row.get(name) is None:
        raise BadRowError(f"the column {name} is empty: every row needs one")
    try:
        return read(row[name])
    except BadRowError as reason:
        raise BadRowError(f"the column {name} {reason}") from None


def _read_text(value: Any) -> str:
    if isinstance(value, (list, dict)):
        raise BadRowError(f"must hold text as in other rows, not a {type(value).__name__}")
    return value if isinstance(value, str) else str(value)


def _read_turns_or_text(value: Any) -> str | list[Message]:
    value = parse_turns(value)
    return value if isinstance(value, str) else read_messages(value)


def _read_optional(row: Mapping[str, Any], name: str | None) -> str:
    value = row.get(name or "")
    return "" if value is None else str(value)


def _read_label(row: Mapping[str, Any], name: str | None) -> bool | None:
    if name is None:
        return None
    value = row.get(name)
    word = value.lower() if isinstance(value, str) else value
    known = _TRUTHS.get(word) if isinstance(word, (str, int, float)) else None
    if known is None:
        raise BadRowError(f"the column {name} must hold true or false, not {value!r}")
    return known


def _read_margin(row: Mapping[str, Any], name: str | None) -> float:
    value = row.get(name or "")
    if value is None:
        return 0.0
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise BadRowError(f"the column {name} must hold a number, not {value!r}")
    return margin


def _read_variables(row: Mapping[str, Any], name: str | None) -> Mapping[str, Any] | None:
    value = row.get(name or "")
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = ""
    if value is not None and not isinstance(value, Mapping):
        raise BadRowError(f"the column {name} must hold variables by name, as a JSON object")
    return value and {key: item for key, item in value.items() if item is not None}
