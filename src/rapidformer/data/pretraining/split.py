"""``--split``: which part of the data trains, validates and tests, with Megatron's arithmetic.

Each fraction is rounded separately (to even, as Python rounds), and the surplus or deficit of the
three is subtracted from every boundary, including the first. So splitting ten items by '969, 30, 1'
gives ten, none and none.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rapidformer.errors import ConfigurationError

SPLIT_NAMES = ("train", "valid", "test")


class SplitRange(NamedTuple):
    """A part of the data: sequences for GPT, documents for BERT and T5."""

    name: str
    start: int
    stop: int


def parse_split(text: str) -> tuple[float, float, float]:
    """Fractions of '969, 30, 1', '90/5/5' or '1' that add up to one."""
    separator = "," if "," in text else "/"
    words = [word.strip() for word in str(text).split(separator)]
    numbers = [parse_number(word) for word in words]
    problems = [f"{w!r} is no number" for w, n in zip(words, numbers, strict=True) if n is None]
    weights = [number for number in numbers if number is not None]
    problems += [f"{weight:g} is negative" for weight in weights if weight < 0]
    if len(words) > 3:
        problems.append(f"there are {len(words)} numbers")
    if not problems and sum(weights) == 0:
        problems.append("all the weights are zero")
    if problems:
        raise ConfigurationError(
            f"--split {text!r}: {', '.join(problems)}. It takes up to three weights, for training, "
            "validation and test, such as 969,30,1."
        )
    total = sum(weights)
    train, valid, test = [weight / total for weight in [*weights, 0.0, 0.0][:3]]
    return train, valid, test


def split_ranges(text: str, size: int) -> list[SplitRange]:
    """The three ranges that ``size`` items are split into; some may be empty."""
    bounds = split_bounds(text, size)
    return [SplitRange(name, bounds[i], bounds[i + 1]) for i, name in enumerate(SPLIT_NAMES)]


def split_bounds(text: str, size: int) -> list[int]:
    """0, where validation starts, where the test set starts, and ``size``."""
    bounds = [0]
    for weight in parse_split(text):
        bounds.append(bounds[-1] + round(weight * float(size)))
    surplus = bounds[-1] - size
    # An empty first part would start before the first item if it gave one up too.
    return [0, *(max(bound - surplus, 0) for bound in bounds[1:])]


def parse_number(word: str) -> float | None:
    """A finite number, or None."""
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
