"""One seed for every source of random numbers."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed Python, NumPy and torch; ``deterministic`` also selects deterministic kernels."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


class RandomState:
    """The state of torch's random numbers on the host and on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._host = device, torch.get_rng_state()
        self._of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device, self._device)
