"""What the loop measures between two log lines, without ever waiting for the device.

Losses and norms stay on the device as one small tensor per update; at a log interval they are
reduced over the processes together and read once. So a loss that is no longer a number is still
found with its exact step, though nobody looked when it happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rapidformer.data.batch import BatchInfo
from rapidformer.dist.collectives import sum_over_replicas
from rapidformer.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One log interval."""

    losses: list[float]
    parts: dict[str, float]
    """What the loss was made of, by name, as means over the interval."""
    grad_norm: float
    seconds: float
    tokens: int
    slots: int
    samples: int

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


class WeightedSums:
    """Sums of means x their weights, by name, that become means over everything."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.weight: float | torch.Tensor = 0.0
        self._dtype = dtype

    def add(
        self, means: Mapping[str, torch.Tensor], weight: float | torch.Tensor, info: BatchInfo
    ) -> None:
        # A mean over no labels is not a number, and has no part in the whole either.
        counts = bool(info.rows) and (isinstance(weight, torch.Tensor) or bool(weight))
        for name, mean in means.items():
            value = mean.detach().to(self._dtype or mean.dtype)
            # Zero where it does not count: every process must have every name.
            part = value * weight if counts else torch.zeros_like(value)
            if isinstance(weight, torch.Tensor):
                part = torch.where(weight == 0, torch.zeros_like(part), part)
            self.sums[name] = self.sums[name] + part if name in self.sums else part
        if counts:
            self.weight = self.weight + weight

    def read_means(self) -> dict[str, float]:
        """The means over all processes."""
        sums = list(self.sums.values())
        weight = torch.as_tensor(self.weight, dtype=sums[0].dtype, device=sums[0].device)
        *totals, count = sum_over_replicas(torch.stack([*sums, weight])).tolist()
        return {
            name: total / count if count else math.nan
            for name, total in zip(self.sums, totals, strict=True)
        }


class Meter:
    """Collects micro-batches and updates until somebody reads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start()
        self._update = WeightedSums()

    def _start(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._parts: dict[str, torch.Tensor] = {}
        self._norms: list[torch.Tensor] = []
        self._rows = self._tokens = self._slots = 0
        self._since = time.perf_counter()

    def add_micro_batch(
        self, means: Mapping[str, torch.Tensor], weight: float | torch.Tensor, info: BatchInfo
    ) -> None:
        """Add the ``loss``, and what it is made of, as means over a weight."""
        self._update.add(means, weight, info)
        self._rows += info.rows
        self._tokens += info.tokens
        self._slots += info.slots

    def add_update(self, total_weight: float | torch.Tensor, norm: torch.Tensor | None) -> None:
        """Close an update: its loss is the mean over the whole global batch."""
        sums = self._update.sums
        means = {name: (total / total_weight).float() for name, total in sums.items()}
        self._losses.append(means.pop("loss", torch.zeros((), device=self._device)))
        for name, mean in means.items():
            self._parts[name] = self._parts[name] + mean if name in self._parts else mean
        self._norms.append(norm if norm is not None else torch.zeros((), device=self._device))
        self._update = WeightedSums()

    def pause(self) -> float:
        """The time of now, for ``resume``: what lies between is not training."""
        return time.perf_counter()

    def resume(self, paused_at: float) -> None:
        self._since += time.perf_counter() - paused_at

    def has_updates(self) -> bool:
        return bool(self._losses)

    def read(self, step: int, *, tolerates_infinity: bool) -> Measurement:
        """Reduce, read and start anew; raises where a loss or a norm is not a number."""
        updates = len(self._losses)
        losses = torch.stack([*self._losses, *self._parts.values()])
        counts = torch.tensor(
            [self._rows, self._tokens, self._slots], dtype=torch.float64, device=self._device
        )
        norms = torch.stack(self._norms).float() if self._norms else losses.new_zeros(1)
        packed = sum_over_replicas(torch.cat([losses.double(), counts]))
        values: list[float] = packed.tolist()
        norm_values: list[float] = norms.tolist()
        measurement = Measurement(
            losses=values[:updates],
            parts={
                name: total / updates
                for name, total in zip(self._parts, values[updates:], strict=False)
            },
            grad_norm=norm_values[-1],
            seconds=time.perf_counter() - self._since,
            samples=int(values[-3]),
            tokens=int(values[-2]),
            slots=int(values[-1]),
        )
        self._start()
        _check_numbers(measurement.losses, norm_values, step, tolerates_infinity=tolerates_infinity)
        return measurement


def _check_numbers(
    losses: list[float], norms: list[float], step: int, *, tolerates_infinity: bool
) -> None:
    first = step - len(losses) + 1
    for offset, (loss, norm) in enumerate(zip(losses, norms, strict=False)):
        # Under fp16 an overflow of the gradient is ordinary: the scaler skips that update.
        is_bad = not math.isfinite(loss) or (not math.isfinite(norm) and not tolerates_infinity)
        if is_bad:
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient is {norm}"
            raise TrainingError(
                f"{what} at step {first + offset}: training has stopped, nothing was saved since."
                " Look at the data of that step (empty or broken rows), lower --lr, lengthen the"
                " warm-up, or set --clip-grad; --mixed-precision fp16 is less robust than bf16."
            )
