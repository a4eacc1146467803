"""Several data sets as one, each as often as its weight says.

The rule is Megatron's: at step ``s``, the data set furthest behind ``weight * s`` gives its next
sample, the first one if several tie. Each step of this loop depends on the one before, yet
thousands of stretches are run side by side here. Each stretch starts from a guess that its first
few steps correct; a stretch that did not begin as the previous one ended is rerun from there. So
the order equals the loop's exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rapidformer.errors import ConfigurationError, DataError

Prefix = str | Path | Sequence[str]
_SMALL = 50_000
"""Below this, the plain loop is as fast."""
_STRETCHES = 8192
_WARM_UP = 128
_MAX_ROUNDS = 64
_SURPLUS = 1.005
"""Each data set is made this much larger than needed, so that none runs out early."""


class WeightedPrefix(NamedTuple):
    """A data set of a blend; the weights of a blend add up to one."""

    weight: float
    prefix: str


def parse_data_prefix(prefix: Prefix, flag: str = "--data-path") -> list[WeightedPrefix]:
    """One prefix, or alternating weights and prefixes: ``0.3 first 0.7 second``."""
    words = [str(w).strip() for w in ([prefix] if isinstance(prefix, (str, Path)) else prefix)]
    if len(words) == 1:
        return [WeightedPrefix(1.0, words[0])]
    problems = []
    if not words:
        problems.append(f"{flag} is empty")
    elif len(words) % 2:
        problems.append(f"{flag} has {len(words)} items, which are no pairs")
    weights = [parse_number(word) or 0 for word in words[::2]]
    problems += [
        f"{word!r} in {flag} is not a positive number"
        for word, weight in zip(words[::2], weights, strict=True)
        if weight <= 0
    ]
    if problems:
        raise ConfigurationError(
            f"{'; '.join(problems)}. It takes one prefix of .bin and .idx files, or weights and "
            "prefixes by turns: 0.3 first_text_document 0.7 second_text_document."
        )
    total = sum(weights)
    return [
        WeightedPrefix(weight / total, prefix)
        for weight, prefix in zip(weights, words[1::2], strict=True)
    ]


def count_for_weight(num_samples: int, weight: float) -> int:
    """How many samples a data set must have to contribute its fraction of this many."""
    return math.ceil(num_samples * weight * _SURPLUS)


class BlendedDataset:
    """The data sets in blend order, as many samples as were asked for (as Megatron since 23.06)."""

    def __init__(
        self,
        datasets: Sequence[Any],
        index: Mapping[str, np.ndarray],
        names: Sequence[str] | None = None,
    ) -> None:
        self.datasets = list(datasets)
        self._names = names or [f"number {number + 1}" for number in range(len(self.datasets))]
        self._index = index
        needed = np.bincount(index["dataset"], minlength=len(self.datasets)).tolist()
        short = [
            f"number {number + 1} has {len(dataset)} samples of {count}"
            for number, (dataset, count) in enumerate(zip(self.datasets, needed, strict=True))
            if len(dataset) < count
        ]
        if short:
            raise DataError(f"data sets are too short for their weights: {', '.join(short)}.")

    def __len__(self) -> int:
        return len(self._index["dataset"])

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        dataset = self.datasets[self._index["dataset"][index]]
        return dataset[int(self._index["sample"][index])]

    def find_set(self, index: int) -> str:
        """The data set that a sample is from."""
        return str(self._names[self._index["dataset"][index]])


def build_blend_index(weights: Sequence[float], size: int) -> dict[str, np.ndarray]:
    """For each step, which data set gives a sample, and which of its samples."""
    if len(weights) > np.iinfo(np.int16).max:
        raise DataError(f"{len(weights)} data sets are too many for one blend.")
    chosen = choose_datasets(np.asarray(weights, dtype=np.float64), size)
    samples = np.empty(size, dtype=np.int64)
    for number in range(len(weights)):
        places = np.nonzero(chosen == number)[0]
        samples[places] = np.arange(places.size)
    dtype = np.uint8 if len(weights) < np.iinfo(np.uint8).max else np.int16
    return {"dataset": chosen.astype(dtype), "sample": samples}


def choose_datasets(weights: np.ndarray, size: int) -> np.ndarray:
    """The index of the data set that gives a sample, for each step."""
    if size < _SMALL:
        return _choose_one_by_one(weights, 0, size, np.zeros(weights.size))
    length = -(-size // min(_STRETCHES, size // _WARM_UP))
    count = -(-size // length)
    firsts = np.arange(count) * length
    begins = _guess_taken(weights, firsts)
    chosen, ends = _run(weights, firsts, begins, length)
    for rounds_left in reversed(range(_MAX_ROUNDS + 1)):
        wrong = np.nonzero((begins[:, 1:] != ends[:, :-1]).any(axis=0))[0] + 1
        if not wrong.size:
            break
        if not rounds_left:
            # With tiny weights, a guess takes very long to become right. The stretches before the
            # first wrong one are exact; the loop continues from there.
            first = int(firsts[wrong[0]])
            rest = _choose_one_by_one(weights, first, size - first, ends[:, wrong[0] - 1])
            return np.concatenate([chosen.T.reshape(-1)[:first], rest])
        begins[:, wrong] = ends[:, wrong - 1]
        chosen[:, wrong], ends[:, wrong] = _run(weights, firsts[wrong], begins[:, wrong], length)
    return chosen.T.reshape(-1)[:size]


def _choose_one_by_one(
    weights: np.ndarray, first: int, count: int, taken: np.ndarray
) -> np.ndarray:
    quotas, counts = weights.tolist(), taken.tolist()
    chosen = np.empty(count, dtype=np.int16)
    for step in range(first, first + count):
        position = float(max(step, 1))
        behind = [quota * position - had for quota, had in zip(quotas, counts, strict=True)]
        best = behind.index(max(behind))
        chosen[step - first] = best
        counts[best] += 1.0
    return chosen


def _guess_taken(weights: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """What each data set has given before each of these steps; nearly always right."""
    earlier = np.maximum(steps - _WARM_UP, 0)
    quotas = weights[:, None] * earlier
    taken = np.floor(quotas)
    missing = earlier - taken.sum(axis=0)
    ranks = (taken - quotas).argsort(axis=0).argsort(axis=0)
    taken += ranks < missing
    _, taken = _run(weights, earlier, taken, _WARM_UP)
    taken[:, 0] = 0.0  # nothing precedes the first stretch: it alone is known, not guessed
    return taken


def _run(
    weights: np.ndarray, firsts: np.ndarray, taken: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rule, for ``length`` steps from each starting point; counts are integral doubles."""
    taken = taken.copy()
    chosen = np.empty((length, firsts.size), dtype=np.int16)
    steps = firsts.astype(np.float64)
    columns = np.arange(firsts.size)
    for row in chosen:
        position = np.maximum(steps, 1.0)
        best = weights[0] * position - taken[0]
        row[:] = 0
        for number in range(1, weights.size):
            behind = weights[number] * position - taken[number]
            row[behind > best] = number
            np.maximum(best, behind, out=best)
        taken[row, columns] += 1.0
        steps += 1.0
    return chosen, taken


SPLIT_NAMES = ("train", "valid", "test")


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


def split_bounds(text: str, size: int) -> list[int]:
    """0, where validation starts, where the test set starts, and ``size``.

    By Megatron's arithmetic: each fraction is rounded separately (to even), and the surplus or
    deficit of the three is subtracted from every boundary: ten items by '969, 30, 1' are ten, none
    and none.
    """
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
