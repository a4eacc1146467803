"""One seed for every source of random numbers, and numbers that follow from others."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from torch import Tensor

_MOST = 2**32
"""Seeds are below; in a process that nobody has seeded, torch draws one of 64 bits."""
_own_seeds: set[int] = set()


def is_seeded() -> bool:
    """Whether the script, or the library, has seeded torch."""
    return torch.initial_seed() < _MOST


def find_foreign_seed() -> int | None:
    """What the script has seeded torch with; None if nobody but the library has."""
    seed = torch.initial_seed()
    return seed if is_seeded() and seed not in _own_seeds else None


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed Python, NumPy and torch; ``deterministic`` also selects deterministic kernels."""
    _own_seeds.add(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def seed_torch(seed: int, device: torch.device) -> None:
    """As ``torch.manual_seed``, for code that runs often.

    That one also notes the call for each kind of device that is not in use, with its stack, which
    takes a millisecond.
    """
    _own_seeds.add(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def hash_bits(numbers: Tensor) -> Tensor:
    """A hash of 32-bit integers: each bit of the input changes about half of the output's bits.

    https://github.com/skeeto/hash-prospector calls it lowbias32. Products overflow, as they should.
    Shifts of signed numbers copy the sign, hence the masks.
    """
    numbers = (numbers ^ ((numbers >> 16) & 0xFFFF)) * 0x7FEB352D
    numbers = (numbers ^ ((numbers >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return numbers ^ ((numbers >> 16) & 0xFFFF)


class RandomState:
    """The state of torch's random numbers on the host and on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._host = device, torch.get_rng_state()
        self._of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device, self._device)
