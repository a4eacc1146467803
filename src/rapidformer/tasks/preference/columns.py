"""Find the columns of preference data: pairs of answers, or answers with a label.

All usual layouts are known by their columns. The prompt may be a text, a conversation, or what both
answers have in common.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import DataError
from rapidformer.tasks.chat.columns import CONTEXT, MESSAGES, PROMPT, RESPONSE, SYSTEM, TOOLS
from rapidformer.tasks.rows.columns import ColumnRole, as_optional, describe_missing, find_column
from rapidformer.tasks.rows.rows import get_column_names

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
