"""Optimizers that divide gradients or leave out an update as tensors on the device say.

torch's fused optimizers do this for ``GradScaler``, in the same pass as the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

PRIVATE_NAMES = {
    "torch.optim.AdamW._step_supports_amp_scaling": "skipping a bad update without a host wait",
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "users' hooks that look at gradients",
    "torch.optim.Optimizer._global_optimizer_pre_hooks": "the same, for all optimizers",
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


def step_divided(divisor: torch.Tensor, optimizer: Any, step: Callable[[], object]) -> None:
    """Run the optimizer's ``step``, which divides every gradient by ``divisor`` on the way."""
    optimizer.grad_scale = divisor
    try:
        step()
    finally:
        del optimizer.grad_scale


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether something looks at the gradients right before each update."""
    return bool(_global_optimizer_pre_hooks or optimizer._optimizer_step_pre_hooks)
