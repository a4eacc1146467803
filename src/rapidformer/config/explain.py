"""Every row in a run: on, off or not applicable, why, and how to change that.

Everything here follows from the rows (``switches.py``), without torch. Whether a row finds
something to change in a model is known only once it was applied: an engine passes what it applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rapidformer.config.row import AUTO
from rapidformer.config.schema import get_settings
from rapidformer.config.settings import Settings
from rapidformer.config.switches import SWITCHES, Situation, Switch, to_flag

State = Literal["on", "off", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One row in this run."""

    name: str
    state: State
    why: str
    measured: str
    """What it gained or cost where that was measured; empty if it was not."""
    change: str
    """How to change the state; empty if it cannot be changed."""


def explain(
    args: Settings,
    situation: Situation | None = None,
    applied: Mapping[str, str] | None = None,
    obstacles: Mapping[str, str] | None = None,
) -> list[Answer]:
    """Every row. ``applied`` has the rows that changed something, each with its start-up line.

    ``obstacles`` says why others, although they are on, have no effect on this model.
    """
    situation = situation or Situation()
    answers = [_answer(switch, args, situation, applied, obstacles or {}) for switch in SWITCHES]
    return sorted(answers, key=lambda answer: get_args(State).index(answer.state))


def list_missed(args: Settings, situation: Situation, steps: int) -> list[str]:
    """What would make a run of so many steps faster by what was measured: the most first."""
    device = situation.device or ""
    missed = [
        switch
        for switch in SWITCHES
        if device in switch.times
        and steps >= switch.pays_from
        and not switch.is_on(args)
        and switch.find_obstacle(args, situation) is None
    ]
    missed.sort(key=lambda switch: -switch.times[device])
    return [
        f"{_describe_change(each, args, 'off')} (up to {each.times[device]:.1f} x as fast)"
        for each in missed
    ]


def render(answers: list[Answer]) -> Iterator[str]:
    """Plain lines, for a file or a pipe."""
    for answer in answers:
        measured = f" Measured: {answer.measured}." if answer.measured else ""
        change = f" To change: {answer.change}." if answer.change else ""
        yield f"{answer.state:<15}{answer.name}: {answer.why}.{measured}{change}"


def _answer(
    switch: Switch, args: Settings, situation: Situation, applied: Mapping[str, str] | None,
    obstacles: Mapping[str, str],
) -> Answer:  # fmt: skip
    state, why = _decide(switch, args, situation)
    # A setting without a module of its own is on if it was asked for.
    is_found = applied is None or switch.name in applied
    if state == "on" and switch.name in obstacles:
        state, why = "not applicable", obstacles[switch.name]
    elif state == "on" and not is_found and (switch.module or switch.kind != "asked"):
        what = "this model has" if switch.module else "this model and its optimizer have"
        state, why = "not applicable", f"{what} nothing that it would change"
    elif state == "on" and applied is not None and applied.get(switch.name):
        why = f"{why}: {applied[switch.name]}"
    does = switch.does or get_settings()[switch.turned_on_by[0]].help.split(": ")[0]
    change = _describe_change(switch, args, state)
    return Answer(
        name=switch.name, state=state, why=f"{does} ({why})", measured=switch.gain, change=change
    )


def _decide(switch: Switch, args: Settings, situation: Situation) -> tuple[State, str]:
    if not switch.is_on(args):
        if not switch.turned_on_by:
            return "off", f"--without {switch.word}"
        # A setting that is on by default was turned off.
        for name in () if switch.on_values else switch.turned_on_by:
            if getattr(args, name) != get_settings()[name].default:
                return "off", f"{to_flag(name)} {getattr(args, name)}"
        return "off", "not asked for"
    obstacle = switch.find_obstacle(args, situation)
    if obstacle is not None:
        return "not applicable", obstacle.reason
    if not switch.turned_on_by:
        return "on", "by itself" if switch.kind == "automatic" else "always"
    if not switch.is_asked(args):
        return "on", f"by default where it pays: {to_flag(switch.turned_on_by[0])} {AUTO}"
    return "on", f"asked for: {switch.describe(args)}"


def _describe_change(switch: Switch, args: Settings, state: State) -> str:
    """How to turn it off or on; empty for what follows from something else."""
    if not switch.turned_on_by:
        if state == "off":
            return f"leave {switch.word} out of --without"
        return f"--without {switch.word}" if switch.has_word and state == "on" else ""
    setting = get_settings()[switch.turned_on_by[0]]
    if state == "on":
        off = switch.off.get(setting.name)
        has_off = off is not None and not switch.on_values
        return f"{setting.flag} {off}" if has_off else f"leave out {switch.describe(args)}"
    if state == "off":
        values = {bool: "", int: "N", float: "X"}
        value = next(iter(switch.on_values or setting.choices), values.get(setting.kind, "FILE"))
        return f"{setting.flag} {value}".strip()
    return ""
