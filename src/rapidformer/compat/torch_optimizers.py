"""Optimizers that divide gradients or leave out an update as tensors say, as for GradScaler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

PRIVATE_NAMES = {
    "torch.optim.AdamW._step_supports_amp_scaling": "skipping a bad update without a host wait",
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "users' hooks that look at gradients",
    "torch.optim.Optimizer._global_optimizer_pre_hooks": "the same, for all optimizers",
    "torch.optim.Optimizer._optimizer_step_post_hooks": "users' hooks that look at updates",
    "torch.optim.Optimizer._global_optimizer_post_hooks": "the same, for all optimizers",
    "torch.optim.lr_scheduler.LRScheduler._step_count": "resuming a schedule",
    "torch.optim.lr_scheduler.LRScheduler._last_lr": "resuming a schedule",
    "torch.optim.lr_scheduler.LRScheduler._wrapped_by_lr_sched": "an optimizer that steps when due",
    "torch.optim.lr_scheduler.LRScheduler._opt_called": "an optimizer that steps when due",
}
_BUFFER = "momentum_buffer"


def obeys_flags(optimizer: Optimizer) -> bool:
    """Whether ``step_unless`` works with this optimizer."""
    if isinstance(optimizer, SGD) and any(group["dampening"] for group in optimizer.param_groups):
        return False  # its first update differs from the others: it must not be one left out
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(flag: Tensor, optimizer: Any, step: Callable[[], object]) -> None:
    """Run the optimizer's ``step``, which changes nothing if ``flag`` is 1.0."""
    fresh = [
        parameter
        for group in (optimizer.param_groups if isinstance(optimizer, SGD) else ())
        for parameter in (group["params"] if group["momentum"] else ())
        if parameter.grad is not None and optimizer.state[parameter].get(_BUFFER) is None
    ]
    optimizer.found_inf, optimizer.grad_scale = flag, None
    try:
        step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale
    for parameter in fresh:
        # A first update that is left out creates the buffers but never fills them.
        optimizer.state[parameter][_BUFFER].masked_fill_(flag > 0, 0.0)


def step_divided(divisor: Tensor, optimizer: Any, step: Callable[[], object]) -> None:
    """Run the optimizer's ``step``, which divides every gradient by ``divisor`` on the way."""
    optimizer.grad_scale = divisor
    try:
        step()
    finally:
        del optimizer.grad_scale


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether something must see each update, before or after it."""
    tables = (
        _global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks,
        _global_optimizer_post_hooks, optimizer._optimizer_step_post_hooks,
    )  # fmt: skip
    hooks = (hook for table in tables for hook in table.values())
    return any(not getattr(hook, "may_be_skipped", False) for hook in hooks)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether something looks at the gradients right before each update."""
    return bool(_global_optimizer_pre_hooks or optimizer._optimizer_step_pre_hooks)


def step_without_hooks(cls: Any, optimizer: Optimizer) -> None:
    """A class's own ``step``, without the hooks that a subclass's ``step`` has run already."""
    step = cls.step
    # torch wraps the `step` of every class of which there is an object.
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


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
