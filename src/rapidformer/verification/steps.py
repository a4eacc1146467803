"""Records what each optimizer step is made with besides its gradient.

The optimizer itself is watched, so what is recorded is what reaches it: the learning rates, and
the gradient after clipping.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rapidformer.verification.trace import MicroBatchWeight, Step

_DRAWN = 4


class StepRecorder:
    """Fills in the steps of a trace."""

    def __init__(self, engine: Any, steps: list[Step]) -> None:
        self._engine = engine
        self._steps = steps
        self._micro_batches: list[MicroBatchWeight] = []
        self._size = 0.0
        if engine.updates.clock.keeper is None:
            engine.updates.optimizer.register_step_pre_hook(self._see_optimizer)

    def see_loss(self, weight: float, info: Any, *, is_given: bool) -> None:
        """What a micro-batch weighs, and how many labels its loader counted."""
        shifts = self._engine.updates.weights.shifts_labels
        labels = None if info is None else info.count_labels(shifts_labels=shifts)
        self._micro_batches.append(MicroBatchWeight(weight, labels, is_given))

    def see_gradients(self) -> None:
        """An update begins: its gradient is finished, but not yet clipped."""
        total = float(self._engine.updates.clock.total_weight)
        self._steps.append(Step(micro_batches=self._micro_batches, total_weight=total))
        self._micro_batches = []
        self._size = _measure_gradients(self._engine.model.parallelized.model)

    def see_clip(self, max_norm: float) -> None:
        if self._steps:
            self._steps[-1].max_norm = max_norm

    def _see_optimizer(self, optimizer: Any, *_: Any) -> None:
        if self._engine.updates.clock.is_bypassed or not self._steps:
            return
        step, model = self._steps[-1], self._engine.model.parallelized.model
        step.rates = collect_group_setting(optimizer, model, "lr")
        step.position = getattr(self._engine.updates.lr_scheduler, "last_epoch", None)
        if self._size:
            # Each rank's slices alone: clipping multiplies all of them by the same number.
            step.clip_factor = _measure_gradients(model) / self._size


def collect_group_setting(optimizer: Any, model: nn.Module, setting: str) -> dict[str, float]:
    """A setting of the optimizer's groups, under every name of each parameter."""
    values = {
        id(parameter): float(group[setting])
        for group in optimizer.param_groups
        if setting in group
        for parameter in group["params"]
    }
    named = model.named_parameters(remove_duplicate=False)
    return {name: values[id(p)] for name, p in named if id(p) in values}


def peek_at_draws(device: torch.device) -> list[float]:
    """The next random numbers that dropout would use; they stay the next ones."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        drawn: list[float] = torch.rand(_DRAWN, device=device).tolist()
    return drawn


def _measure_gradients(model: nn.Module) -> float:
    """The norm of this rank's slices."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    slices = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    norms = [float(torch.linalg.vector_norm(s, dtype=torch.float64)) for s in slices]
    return math.sqrt(sum(norm**2 for norm in norms))
