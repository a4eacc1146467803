"""Every switch in a run: on, off or not applicable, and why. Everything follows from the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rapidformer.config.settings import Settings
from rapidformer.config.switches import SWITCHES, Switch, to_flag

State = Literal["on", "off", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One row in this run."""

    name: str
    state: State
    why: str


def explain(args: Settings) -> list[Answer]:
    """Every row, those that are on first."""
    order: list[State] = ["on", "off", "not applicable"]
    return sorted((_answer(s, args) for s in SWITCHES), key=lambda a: order.index(a.state))


def render(answers: list[Answer]) -> Iterator[str]:
    """Plain lines, for a file or a pipe."""
    for answer in answers:
        yield f"{answer.state:<15}{answer.name}: {answer.why}."


def _answer(switch: Switch, args: Settings) -> Answer:
    if not switch.is_on(args):
        flag = to_flag(switch.turned_on_by[0])
        return Answer(name=switch.name, state="off", why=f"not asked for ({flag})")
    if not switch.has_what_it_needs(args):
        needed = " or ".join(rule.describe() for rule in switch.needs)
        return Answer(name=switch.name, state="not applicable", why=f"it needs {needed}")
    why = f"asked for ({switch.describe(args)})" if switch.turned_on_by else "always"
    return Answer(name=switch.name, state="on", why=why)
