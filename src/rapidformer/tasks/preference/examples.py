"""Find the columns of preferences, and read rows as a prompt and its answers: texts or turns.

All usual layouts are known by their columns: pairs of answers, or answers with a label. The prompt
may be a text, a conversation, or what both answers have in common. Errors name the row.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rapidformer.config import Settings
from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import DataError
from rapidformer.tasks.chat.columns import CONTEXT, MESSAGES, PROMPT, RESPONSE, SYSTEM, TOOLS
from rapidformer.tasks.chat.turns import BadRowError, Message, is_empty, join_prompt, read_messages
from rapidformer.tasks.rows.columns import ColumnRole, as_optional, describe_missing, find_column
from rapidformer.tasks.rows.rows import get_column_names

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


CHOSEN = ColumnRole(
    "chosen", "chosen_column", "the better answer (a text or turns)",
    ("chosen", "chosen_response", "chosen_answer", "preferred"),
)  # fmt: skip
REJECTED = ColumnRole(
    "rejected", "rejected_column", "the worse answer",
    ("rejected", "rejected_response", "rejected_answer", "dispreferred"),
)  # fmt: skip
ANSWER = ColumnRole(
    "response", "response_column", "the answer to the prompt",
    ("completion", *(name for name in RESPONSE.candidates if name != "completion")),
    required=False,
)  # fmt: skip
LABEL = ColumnRole(
    "label", "label_column", "whether the answer is good: true or false (for KTO)",
    ("label", "kto_tag", "desirable"), required=False,
)  # fmt: skip
MARGIN = ColumnRole(
    "margin", "margin_column", "by how much the better answer is better", ("margin",),
    required=False,
)  # fmt: skip
PAIR_ROLES = (as_optional(CHOSEN), as_optional(REJECTED), as_optional(PROMPT), MESSAGES, CONTEXT,
              SYSTEM, TOOLS)  # fmt: skip
VARIABLES = "chat_template_kwargs"
"""A column of variables for the chat template."""


@dataclass(frozen=True, kw_only=True)
class PreferenceColumns:
    """The columns of a table; a pair has ``rejected``, an answer with a label ``label``."""

    chosen: str | None = None
    """The better answer; None: it ends the conversation."""
    rejected: str | None = None
    response: str | None = None
    label: str | None = None
    prompt: str | None = None
    """A text or turns; None: in the conversation, or what both answers begin with."""
    messages: str | None = None
    context: str | None = None
    system: str | None = None
    tools: str | None = None
    variables: str | None = None
    margin: str | None = None
    has_turns: bool = False
    """Whether any of them holds turns: then the rows are conversations."""

    @property
    def is_pair(self) -> bool:
        return self.rejected is not None

    @property
    def has_prompt(self) -> bool:
        """Whether the prompt is given, not what both answers begin with."""
        return self.prompt is not None or self.messages is not None

    @property
    def answers(self) -> tuple[str | None, ...]:
        """The columns of the answers, the better one first; None: it ends the conversation."""
        return (self.chosen, self.rejected) if self.is_pair else (self.response,)

    def get_needed(self) -> list[str]:
        """Those that every split must have."""
        names = (*self.answers, self.label, self.prompt, self.messages)
        return [name for name in names if name is not None]


def find_preference_columns(rows: Any, args: Settings, *, may_be_single: bool) -> PreferenceColumns:
    """The columns of pairs or, if they ``may_be_single``, of answers with a label."""
    available = get_column_names(rows)
    rejected = find_column(as_optional(REJECTED), available, args)
    label = None if rejected is not None else find_column(LABEL, available, args)
    if rejected is None and (label is None or not may_be_single):
        raise DataError(_describe_no_pairs(available, args, label))
    chosen = find_column(as_optional(CHOSEN), available, args, [rejected])
    taken = [rejected, chosen, label]
    messages = _find_turns(rows, available, args, taken)
    prompt = response = None
    if messages is None:
        prompt = find_column(as_optional(PROMPT), available, args, taken)
        needed = [(CHOSEN, chosen)]
        if label is not None:
            response = find_column(ANSWER, available, args, [*taken, prompt])
            needed = [(PROMPT, prompt), (ANSWER, response)]
        if missing := [role for role, name in needed if name is None]:
            raise DataError(describe_missing(missing, available))
    taken += [messages, prompt, response]
    is_text = prompt is not None and not _holds_turns(rows, prompt)
    answers = (chosen, rejected, response, prompt)
    has_turns = messages is not None or any(_holds_turns(rows, name) for name in answers)
    return PreferenceColumns(
        chosen=chosen, rejected=rejected, response=response, label=label, prompt=prompt,
        messages=messages, has_turns=has_turns,
        context=find_column(CONTEXT, available, args, taken) if is_text else None,
        system=find_column(SYSTEM, available, args, taken),
        tools=find_column(TOOLS, available, args, taken) if has_turns else None,
        variables=VARIABLES if VARIABLES in available else None,
        margin=find_column(MARGIN, available, args, taken),
    )  # fmt: skip


def _find_turns(
    rows: Any, available: Sequence[str], args: DataArguments, taken: Sequence[str | None]
) -> str | None:
    """The column of a whole conversation; a flag for the prompt takes precedence over its names."""
    if args.prompt_column is not None and args.messages_column is None:
        return None
    name = find_column(MESSAGES, available, args, taken)
    return name if args.messages_column is not None or _holds_turns(rows, name) else None


def _describe_no_pairs(available: Sequence[str], args: Settings, label: str | None) -> str:
    if label is not None:
        hint = ": --loss kto learns from those." if args.task == "preference" else "."
        return (
            f"The data has answers with a label ({label}), not pairs of a chosen and a rejected "
            f"answer{hint}"
        )
    has_chosen = find_column(as_optional(CHOSEN), available, args) is not None
    missing = describe_missing([REJECTED] if has_chosen else [CHOSEN, REJECTED], available)
    if args.loss == "kto":
        missing += " For answers with a label, name it with --label-column."
    return missing


def _holds_turns(rows: Any, name: str | None) -> bool:
    """Whether the first cell that holds something holds messages, or one message."""
    first = next((row[name] for row in rows if row.get(name)), None) if name else None
    turns = parse_turns(first)
    return isinstance(turns, Sequence) and isinstance(turns[0], Mapping)


def parse_turns(value: Any) -> Any:
    """Turns, or one turn, perhaps as JSON; an answer may be JSON, too, and stays a text."""
    if isinstance(value, str) and value.lstrip().startswith(("[{", "{")):
        with contextlib.suppress(ValueError):
            parsed = json.loads(value)
            if isinstance(parsed, list) or not {"role", "from"}.isdisjoint(parsed):
                value = parsed
    return [value] if isinstance(value, Mapping) else value
