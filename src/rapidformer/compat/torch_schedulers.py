"""Learning-rate schedulers: their position, and the marks they leave on an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

PRIVATE_NAMES = {
    "torch.optim.lr_scheduler.LRScheduler._step_count": "resuming a schedule",
    "torch.optim.lr_scheduler.LRScheduler._last_lr": "resuming a schedule",
    "torch.optim.lr_scheduler.LRScheduler._wrapped_by_lr_sched": "an optimizer that steps when due",
    "torch.optim.lr_scheduler.LRScheduler._opt_called": "an optimizer that steps when due",
}


def set_position(scheduler: LRScheduler, position: int, rates: Sequence[float | Tensor]) -> None:
    """Set a schedule to a position in updates, at which it gives these rates."""
    scheduler.last_epoch = position
    scheduler._step_count = position + 1
    scheduler._last_lr = list(rates)


def get_saved_rates(saved: dict[str, Any]) -> list[float | Tensor] | None:
    """The rates in a scheduler's saved state; None if that kind does not store them."""
    return saved.get("_last_lr")


def mark_as_counted(step: Callable[..., Any]) -> None:
    """Mark this ``step`` so that schedulers do not wrap it to count calls."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    # And torch's own mark: the inner step already runs the optimizer's hooks.
    step.hooked = True  # type: ignore[attr-defined]


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Keep schedulers from warning that they step before the optimizer."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
