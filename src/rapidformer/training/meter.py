"""What the loop measures between two log lines, without ever waiting for the device.

Losses and norms stay on the device as one small tensor per update; at a log interval they are
reduced over the processes together and read once. So a loss that is no longer a number is still
found with its exact step, though nobody looked when it happened.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from rapidformer.data.batch import BatchInfo
from rapidformer.dist.collectives import sum_over_processes
from rapidformer.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One log interval."""

    losses: list[float]
    grad_norm: float
    seconds: float
    tokens: int
    slots: int
    samples: int

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


class Meter:
    """Collects micro-batches and updates until somebody reads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start()
        self._loss_sum: torch.Tensor | None = None

    def _start(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._rows = self._tokens = self._slots = 0
        self._since = time.perf_counter()

    def add_micro_batch(
        self, loss: torch.Tensor, weight: float | torch.Tensor, info: BatchInfo
    ) -> None:
        # A mean over no labels is not a number, and has no part in the update either.
        if info.rows and (isinstance(weight, torch.Tensor) or weight):
            part = loss.detach() * weight
            if isinstance(weight, torch.Tensor):
                part = torch.where(weight == 0, torch.zeros_like(part), part)
            self._loss_sum = part if self._loss_sum is None else self._loss_sum + part
        self._rows += info.rows
        self._tokens += info.tokens
        self._slots += info.slots

    def add_update(self, total_weight: float | torch.Tensor, norm: torch.Tensor | None) -> None:
        """Close an update: its loss is the mean over the whole global batch."""
        if self._loss_sum is None:
            self._loss_sum = torch.zeros((), device=self._device)
        self._losses.append((self._loss_sum / total_weight).float())
        self._norms.append(norm if norm is not None else torch.zeros((), device=self._device))
        self._loss_sum = None

    def pause(self) -> float:
        """The time of now, for ``resume``: what lies between is not training."""
        return time.perf_counter()

    def resume(self, paused_at: float) -> None:
        self._since += time.perf_counter() - paused_at

    def has_updates(self) -> bool:
        return bool(self._losses)

    def read(self, step: int, *, tolerates_infinity: bool) -> Measurement:
        """Reduce, read and start anew; raises where a loss or a norm is not a number."""
        losses = torch.stack(self._losses)
        counts = torch.tensor(
            [self._rows, self._tokens, self._slots], dtype=torch.float64, device=self._device
        )
        norms = torch.stack(self._norms).float() if self._norms else losses.new_zeros(1)
        packed = sum_over_processes(torch.cat([losses.double(), counts]))
        values: list[float] = packed.tolist()
        norm_values: list[float] = norms.tolist()
        measurement = Measurement(
            losses=values[:-3],
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
