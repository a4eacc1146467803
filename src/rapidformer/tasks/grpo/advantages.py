"""From rewards to advantages, and the numbers that are shown of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

EPSILON = 1e-4
"""Added to a standard deviation, which may be 0."""


class Scored(NamedTuple):
    """What is known of an answer besides its tokens: plain numbers, for all ranks."""

    reward: float
    rewards: list[float]
    """Of each function; NaN where it does not apply."""
    length: int
    is_cut: bool
    """Whether it has no end."""


def compute_advantages(
    groups: Sequence[Sequence[float]], scale: str, everyone: Sequence[float]
) -> list[list[float]]:
    """Each reward minus its group's mean; divided by a deviation unless ``scale`` is none.

    Deviations are unbiased: of the group's rewards, or of ``everyone`` in the update (batch).
    """
    of_update = measure_deviation(everyone) if scale == "batch" else None

    def compare(rewards: Sequence[float]) -> list[float]:
        mean, divisor = fmean(rewards), 1.0
        if scale != "none":
            deviation = measure_deviation(rewards) if of_update is None else of_update
            divisor = deviation + EPSILON
        return [(reward - mean) / divisor for reward in rewards]

    return [compare(rewards) for rewards in groups]


def measure_deviation(values: Sequence[float]) -> float:
    """The unbiased standard deviation; 0 of a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def summarize(answers: Sequence[Scored], names: Sequence[str], group_size: int) -> dict[str, float]:
    """The numbers of an update, from all of its answers in groups; the names are TRL's."""
    rewards = [answer.reward for answer in answers]
    groups = [rewards[first : first + group_size] for first in range(0, len(rewards), group_size)]
    lengths = [answer.length for answer in answers]
    shown = {"reward": fmean(rewards), "reward_std": measure_deviation(rewards)}
    for place, name in enumerate(names):
        applied = [v for answer in answers if not math.isnan(v := answer.rewards[place])]
        shown[f"rewards/{name}/mean"] = fmean(applied) if applied else 0.0
        shown[f"rewards/{name}/std"] = measure_deviation(applied)
    shown["frac_reward_zero_std"] = fmean(measure_deviation(group) == 0 for group in groups)
    shown["completions/mean_length"] = fmean(lengths)
    shown["completions/min_length"] = min(lengths)
    shown["completions/max_length"] = max(lengths)
    shown["completions/clipped_ratio"] = fmean(answer.is_cut for answer in answers)
    return shown
