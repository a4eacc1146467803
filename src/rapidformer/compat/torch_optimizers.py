"""Optimizers that leave out an update if a flag on the device says so: the host need not read it.

torch's fused optimizers do this for ``GradScaler``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

PRIVATE_NAMES = {
    "torch.optim.AdamW._step_supports_amp_scaling": "skipping a bad update without a host wait",
}


def obeys_flags(optimizer: Optimizer) -> bool:
    """Whether ``step_unless`` works with this optimizer."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(flag: torch.Tensor, optimizer: Any, step: Callable[[], object]) -> None:
    """Run the optimizer's ``step``, which changes nothing if ``flag`` is 1.0."""
    optimizer.found_inf, optimizer.grad_scale = flag, None
    try:
        step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale
