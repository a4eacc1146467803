"""Random numbers for reading data: a run's model and its data never draw from the same sequence.

What a collate function draws from torch, NumPy or Python belongs to the micro-batch. What it draws
from ``get_sample_seeds`` belongs to each sample, however samples are divided into micro-batches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

_RandomStates = tuple[torch.Tensor, Any, Any]
SampleSeed = tuple[int, ...]

sample_seeds: ContextVar[Sequence[SampleSeed]] = ContextVar("sample_seeds", default=())
"""One for each sample of the micro-batch that is being collated, if the loader knows them."""


def get_sample_seeds(count: int) -> Sequence[SampleSeed]:
    """Seeds for the samples that are being collated; without our loader, drawn from torch."""
    seeds = sample_seeds.get()
    if len(seeds) == count:
        return seeds
    return [(int(seed),) for seed in torch.randint(2**62, (count,))]


class random_numbers_from:  # noqa: N801 - reads as a statement
    """Random numbers from a seed, then the old ones; ``is_continued`` goes on at the next use."""

    def __init__(self, seed: tuple[int, ...], *, is_continued: bool = False) -> None:
        self._seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._is_continued = is_continued
        self._reached: _RandomStates | None = None

    def __enter__(self) -> None:
        self._before = _get_random_states()
        if self._reached is not None:
            _set_random_states(self._reached)
            return
        torch.default_generator.manual_seed(self._seed)
        np.random.seed(self._seed)
        random.seed(self._seed)

    def __exit__(self, *_: object) -> None:
        if self._is_continued:
            self._reached = _get_random_states()
        _set_random_states(self._before)


def _get_random_states() -> _RandomStates:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_random_states(states: _RandomStates) -> None:
    torch_state, numpy_state, python_state = states
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
