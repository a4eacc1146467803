"""What a sweep tries: ``lr=1e-5..1e-3:log``, ``micro_batch_size=8,16``. Without torch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rapidformer.config import Settings, get_settings
from rapidformer.config.schema import Setting, to_flag
from rapidformer.errors import raise_problems
from rapidformer.foreign_names import get_foreign_flags
from rapidformer.nearest import suggest

_FIXED = {"save", "load", "resume", "overwrite", "config", "task", "user_script", "finetune"}
"""Not to be tried: they say which run this is."""
_DIGITS = 4
"""Significant digits of a number that is drawn: a command line is to be read and copied."""


@dataclass(frozen=True)
class Choices:
    """A few values."""

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, Any]:
        return self.values[0], self.values[-1]


@dataclass(frozen=True)
class Range:
    """All numbers from one to another, whole ones or not."""

    low: float
    high: float
    is_whole: bool
    is_log: bool

    @property
    def ends(self) -> tuple[float, float]:
        return self.low, self.high

    def shorten(self, value: float) -> float:
        """The nearest number with few digits."""
        if self.is_whole:
            return int(value)
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)


Space = Mapping[str, Choices | Range]
Parameters = dict[str, Any]


def parse_space(texts: Sequence[str], args: Settings) -> Space:
    """Read every ``name=values``, or raise one error with all problems."""
    space: dict[str, Choices | Range] = {}
    problems: list[str] = []
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.lstrip("-").replace("-", "_")
        name = get_foreign_flags().aliases.get(name, name)
        setting = get_settings().get(name)
        if not equals or not values:
            problems.append(f"--sweep {text}: write name=low..high, name=low..high:log, name=a,b.")
        elif setting is None:
            hint = suggest(name, get_settings())
            problems.append(f"--sweep {text}: there is no setting {name}.{hint}")
        elif name in _FIXED:
            problems.append(
                f"--sweep {text}: {name} is the same for all trials; give it as a flag."
            )
        elif name in space or args.is_given(name):
            problems.append(f"--sweep {text}: {name} is given twice; leave one out.")
        else:
            try:
                space[name] = _parse_values(setting, values)
            except ValueError as reason:
                problems.append(f"--sweep {text}: {reason}.")
    raise_problems(problems)
    return space


def _parse_values(setting: Setting, text: str) -> Choices | Range:
    bounds, colon, scale = text.partition(":")
    low, dots, high = bounds.partition("..")
    if not dots:
        values = tuple(setting.convert(part) for part in text.split(","))
        if len(set(map(str, values))) < len(values):
            raise ValueError("a value is there twice")
        return Choices(values)
    if setting.kind not in (int, float) or setting.is_list:
        raise ValueError(f"{setting.name} is not a number: list its values, as in name=a,b")
    if colon and scale != "log":
        raise ValueError(f"after the colon there may be log, got {scale!r}")
    is_whole = setting.kind is int and not setting.takes_fraction
    ends = [setting.convert(end) for end in (low, high)]
    if not ends[0] < ends[1] or not all(map(math.isfinite, ends)):
        raise ValueError(f"a range goes from a smaller to a larger number, got {bounds}")
    if colon and ends[0] <= 0:
        raise ValueError(f"a logarithmic range begins above 0, got {low}")
    return Range(ends[0], ends[1], is_whole, is_log=bool(colon))


def count_choices(space: Space) -> int | None:
    """How many trials there can be; None if there is a range."""
    choices = [each for each in space.values() if isinstance(each, Choices)]
    return math.prod(len(c.values) for c in choices) if len(choices) == len(space) else None


def list_choices(space: Space, seed: int) -> list[Parameters]:
    """Every combination once, in an order that any number of trials begins with."""
    values = [each.values for each in space.values() if isinstance(each, Choices)]
    combined = [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]
    random.Random(seed).shuffle(combined)
    return combined


def list_corners(space: Space) -> Iterator[Parameters]:
    """The first and the last value of everything: what can be checked before the first trial."""
    for end in (0, 1):
        yield {name: values.ends[end] for name, values in space.items()}


def to_flags(parameters: Parameters) -> list[str]:
    """As on the command line."""
    words = []
    for name, value in parameters.items():
        text = ("true" if value else "false") if isinstance(value, bool) else str(value)
        words.append(f"{to_flag(name)}={text}")
    return words
