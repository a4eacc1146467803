"""When an update happens, and what its gradient is.

The loss contract: the gradient of an update is that of the mean over all labels of the global
batch. Every micro-batch back-propagates a *sum* (its mean x its weight), sums are added over
micro-batches and ranks, and then divided once by the total weight, before clipping.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from rapidformer.compat.torch_tensors import multiply_all
from rapidformer.dist.attendance import note_progress
from rapidformer.dist.collectives import sum_over_replicas
from rapidformer.dist.topology import Topology
from rapidformer.dist.whole import get_shard
from rapidformer.errors import RapidformerError, TrainingError
from rapidformer.optim.gradients import (
    GradientKeeper,
    clip_norm,
    get_divisor,
    get_norm,
    scale_loss,
    take_gradients,
)
from rapidformer.optim.guard import BadUpdate, LossGuard, LossScaler
from rapidformer.optim.observer import get_observer

MeasureNorm = Callable[[Sequence[torch.Tensor]], torch.Tensor]
StepDivided = Callable[[torch.Tensor], None]
"""An optimizer's step that divides every gradient by a number on the way."""


class UpdateClock:
    """Counts micro-batches into updates, and holds the finished gradient until it is used."""

    def __init__(self, rounds_per_update: int, topology: Topology) -> None:
        self.rounds_per_update = rounds_per_update
        self.follows_loader = False
        """Whether only the loader knows which micro-batch ends an update."""
        self._topology = topology
        self.updates = 0
        """Updates done, not counting skipped ones; ``settle`` may still take back the last one."""
        self.first_update = 0
        """Updates that were done when the run began or was resumed."""
        self.skipped = 0
        self.forced: bool | None = None
        """What ``accumulate`` says about the next micro-batch; None lets the count decide."""
        self.total_weight: float | torch.Tensor = 0.0
        """Weight of the last finished global batch."""
        self.is_bypassed = False
        """True while checkpoint code drives the optimizer itself."""
        self.keeper: GradientKeeper | None = None
        self.guard: LossGuard | None = None
        """Judges each update; None unless bad ones are to be skipped or rolled back."""
        self.on_bad_update: Callable[[BadUpdate], None] | None = None
        """Called for an update that was skipped at once; for loops that do not ask ``settle``."""
        self._bad: BadUpdate | None = None
        self._schedule: Callable[[], None] | None = None
        """The schedule's step that waits for its update, or for the verdict on it."""
        self._is_schedule_due = False
        """Whether the schedule has not followed the last update yet."""
        self._has_started = False
        """Whether there has been a gradient."""
        self._parameters: Sequence[nn.Parameter] = ()
        self._norm: torch.Tensor | None = None
        self._measure: Callable[[], torch.Tensor] | None = None
        """The norm of the gradient as it is now; None if it cannot have changed."""
        self._was_dropped = False
        self._total: float | torch.Tensor = 1.0
        self._unit = 1.0
        self._reset()

    def _reset(self) -> None:
        self._rounds = 0
        self._weight: float | torch.Tensor = 0.0
        self._is_complete = self._is_clipped = self._is_applied = False
        self._outcome: str | None = None

    def resume(self, updates: int) -> None:
        """Continue counting after a checkpoint's updates."""
        self.updates = self.first_update = updates
        if self.guard is not None:
            self.guard.forget()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of the last gradient, before clipping, on the device.

        Measured when it is asked for, until the update: scripts change gradients. So every rank
        must ask for that of an update which is not done yet.
        """
        if self.is_unused and not self._is_clipped and self._measure is not None:
            return self._measure()
        return self._norm

    @property
    def num_replicas(self) -> int:
        return self._topology.num_replicas

    @property
    def is_accumulating(self) -> bool:
        """Whether micro-batches are still missing from the gradient."""
        return self._rounds > 0 and not self._is_complete

    @property
    def is_unused(self) -> bool:
        """Whether a finished gradient waits for ``optimizer.step()``."""
        return self._is_complete and self._outcome is None

    @property
    def was_skipped(self) -> bool:
        """Whether the last update was skipped: fp16 overflowed, or its loss is bad."""
        return self._outcome == "skipped"

    @contextmanager
    def accumulate(self, is_last: bool = False) -> Iterator[None]:
        """Say whether the micro-batch inside ends an update, instead of counting."""
        before, self.forced = self.forced, is_last
        try:
            yield
        finally:
            self.forced = before

    def set_aside(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
        """Take away a finished gradient that was not used: the next one starts from nothing."""
        gradients = take_gradients(parameters)
        self._reset()
        return gradients

    def drop_unused(self) -> None:
        """The script has cleared a gradient before its update: there will be none."""
        self._reset()
        self._was_dropped = True

    def start_micro_batch(self, *, ends_update: bool) -> bool:
        """Count one micro-batch; returns whether it is the last of its update."""
        note_progress()
        if self._is_complete:
            if self._outcome is None:
                raise RapidformerError(
                    "the gradient of an update is ready, but optimizer.step() was not called "
                    "before the next engine.backward(), on the optimizer that compose() returned. "
                    "Call it after every backward: it waits by itself until an update is due. Add "
                    "up several losses of a batch: engine.backward(loss + other). To accumulate, "
                    "give --gradient-accumulation-steps, or say `with engine.accumulate(is_last="
                    "...):` around each backward; do not divide the loss by the number of steps."
                )
            self._reset()
        self._was_dropped = False
        self._has_started = True
        self._rounds += 1
        if self.forced is not None:
            return self.forced
        if self.follows_loader:
            return ends_update
        return ends_update or self._rounds >= self.rounds_per_update

    def add_weight(
        self, weight: float | torch.Tensor, *, shared_unit: float | None
    ) -> float | torch.Tensor:
        """Add a micro-batch's weight to the total; returns it in units of the first one's.

        The unit only keeps numbers near 1: with one process and no accumulation, the loss is
        multiplied and divided by exactly 1, which is bit-equal to a plain loop. Ranks that add
        their sums share one unit.
        """
        if self._rounds == 1:
            is_number = not isinstance(weight, torch.Tensor) and weight > 0
            unit = float(weight) if is_number else 1.0
            self._unit = unit if shared_unit is None else shared_unit
        fraction = weight / self._unit
        self._weight = self._weight + fraction
        return fraction

    def add_loss(self, loss: torch.Tensor, fraction: float | torch.Tensor) -> None:
        """Add a micro-batch's mean loss to the one that is judged, if any is."""
        if self.guard is not None:
            self.guard.add_loss(scale_loss(loss.detach(), fraction, 1.0))

    def set_weight(self, total: torch.Tensor, unit: float) -> None:
        """Set the weight of all micro-batches at once, if they were not added one by one."""
        self._weight, self._unit = total / unit, unit

    def finish_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        scaler: LossScaler | None,
        measure: Callable[[MeasureNorm], torch.Tensor] | None = None,
    ) -> None:
        """Turn the sums into the mean (``measure`` its norm: other stages hold parts)."""
        scale = scaler.scale if scaler else 1.0
        if self.keeper is not None:
            total = self.sum_weights(self.keeper.device)
            self._norm = self.keeper.finish(float(total) * scale)
            self._is_complete = True
            return
        self._parameters = parameters
        gradients = self._list_gradients()
        factor = 1.0 / (self.sum_weights(gradients[0].device if gradients else None) * scale)
        if gradients and (isinstance(factor, torch.Tensor) or factor != 1.0):
            multiply_all([get_shard(gradient) for gradient in gradients], factor)
        self._measure = functools.partial(measure, get_norm) if measure else self._measure_own
        self._is_complete = True
        get_observer().see_gradients()

    def take_finished(
        self,
        parameters: Sequence[nn.Parameter],
        norm: torch.Tensor,
        *,
        is_applied: bool,
        may_change: bool,
    ) -> None:
        """Take a gradient that is a mean, and its norm; ``is_applied``: a CUDA graph did."""
        self._is_applied, self._parameters = is_applied, parameters
        self._norm, self._measure = norm, self._measure_own if may_change else None
        self._is_complete = True
        get_observer().see_gradients()

    def _list_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _measure_own(self) -> torch.Tensor:
        return get_norm(self._list_gradients())

    def sum_weights(self, device: torch.device | None) -> float | torch.Tensor:
        """The weight of the global batch: a number in one process, otherwise a tensor."""
        weight = self._weight
        smallest = torch.finfo(torch.float32).tiny  # nothing is learnt if nothing counts
        if device is None and isinstance(weight, torch.Tensor):
            # A frozen pipeline stage has no gradients, but takes part in the count.
            device = weight.device
        if self._topology.num_replicas > 1 and device is not None:
            if isinstance(weight, torch.Tensor):
                weight = weight.to(device, torch.float32, copy=True)
            else:  # not as_tensor: a copy from the host would wait for the device
                weight = torch.full((), weight, dtype=torch.float32, device=device)
            weight = sum_over_replicas(weight, self._topology).clamp(min=smallest)
        elif isinstance(weight, torch.Tensor):
            # Gradients that are offloaded are in host memory.
            weight = weight.to(device).clamp(min=smallest)
        else:
            weight = weight or 1.0
        self._total, self.total_weight = weight, weight * self._unit
        return weight

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """Scale the finished gradient down to a norm, with torch's own arithmetic."""
        if not self._is_complete:
            return None
        if self._measure is not None:
            self._norm = self._measure()
        return self._clip(max_norm)

    def clip_anew(self, max_norm: float) -> None:
        """Clip the gradient, if it is another one than was clipped for this update."""
        if self.is_unused and not self._is_clipped:
            self.clip(max_norm)

    def _clip(self, max_norm: float) -> torch.Tensor:
        """By the norm that was measured."""
        norm = self._norm
        assert norm is not None
        self._is_clipped = True
        max_norm = get_observer().choose_clip(max_norm, norm)
        if self.keeper is not None:
            self.keeper.set_clip(max_norm, norm)
        elif not self._is_applied:
            clip_norm(self._list_gradients(), max_norm, norm)
        return norm

    def use_gradients(
        self,
        step: Callable[[], object],
        clip_grad: float,
        scaler: LossScaler | None,
        step_divided: StepDivided | None = None,
    ) -> None:
        """Do the update, unless it is not due yet, its loss is bad or fp16 overflowed."""
        if self._rounds == 0 or self._outcome is not None:
            raise RapidformerError(
                "optimizer.step() without a gradient: call engine.backward(loss) instead of "
                "loss.backward(), once per micro-batch, before it. Gradients that you compute "
                "yourself: engine.backward(sum((p * g).sum() for p, g in zip(parameters, "
                "gradients)))."
            )
        if not self._is_complete:
            return
        norm = self._norm = self.grad_norm
        assert norm is not None
        if self.guard is not None and self._is_refused(self.guard, norm, scaler):
            self._skip()
            return
        if scaler is not None and not bool(torch.isfinite(norm)):
            self.skipped += 1
            self._skip()
            scaler.update(overflowed=True)
            return
        if self.keeper is not None and not bool(torch.isfinite(norm)):
            # Such a strategy would silently skip this update and every later one.
            raise TrainingError(
                f"the gradient of update {self.updates + 1} is not finite. Look at the data and "
                "the loss, or lower --lr."
            )
        if not self._is_applied:
            self._run_step(step, norm, clip_grad, step_divided)
        if scaler is not None:
            scaler.update(overflowed=False)
        self._outcome = "done"
        self.updates += 1
        self._is_schedule_due = self._schedule is None
        if self._schedule is not None:
            self._move_schedule(self._schedule)
        get_observer().see_update()

    def _run_step(
        self,
        step: Callable[[], object],
        norm: torch.Tensor,
        clip_grad: float,
        step_divided: StepDivided | None,
    ) -> None:
        if step_divided is not None and not self._is_clipped and self.guard is None:
            # Clip and update in one pass over the gradients.
            max_norm = get_observer().choose_clip(clip_grad, norm)
            step_divided(get_divisor(norm, max_norm))
            return
        if not self._is_clipped:
            self._clip(clip_grad)
        self.guard.run_step(step) if self.guard is not None else step()

    def _is_refused(self, guard: LossGuard, norm: torch.Tensor, scaler: LossScaler | None) -> bool:
        """Judge the update; False if it is good, or if the verdict is read later."""
        guard.judge(norm, self._total, tolerates_infinity=scaler is not None)
        if guard.is_late:
            return False
        self._bad = guard.settle()
        if self._bad is not None and self.on_bad_update is not None:
            self.on_bad_update(self._bad)
        return self._bad is not None

    def _skip(self) -> None:
        self._outcome, self._schedule = "skipped", None
        if self.keeper is not None:
            self.keeper.drop()

    def settle(self) -> BadUpdate | None:
        """The verdict on the last update if it was bad, once; step and schedule go back."""
        if self.guard is None or not self.guard.is_pending:
            bad, self._bad = self._bad, None
            return bad
        bad = self.guard.settle()
        schedule, self._schedule = self._schedule, None
        if bad is not None:
            self.updates -= 1
        elif schedule is not None:
            schedule()
        return bad

    def start_over(self, parameters: Sequence[nn.Parameter], updates: int) -> None:
        """Forget gradients and verdicts: the weights of an earlier update were restored."""
        take_gradients(parameters)
        self._reset()
        self.updates = updates
        self._bad = self._schedule = None
        if self.guard is not None:
            self.guard.forget()

    def _move_schedule(self, step: Callable[[], None]) -> None:
        """With the update, or with its verdict if that is read later."""
        is_early = self.guard is not None and self.guard.is_pending
        self._schedule = step if is_early else None
        if not is_early:
            step()

    def advance_schedule(self, step: Callable[[], None]) -> None:
        """Step the scheduler with its update: right away, when the update comes, or not at all."""
        # A gradient that waits or was cleared may have come after the update that this follows: a
        # loss of another model has reached this one.
        is_late = self._is_schedule_due and (self._was_dropped or self.is_unused)
        if self._was_dropped and not is_late:
            raise RapidformerError(
                "lr_scheduler.step() after a gradient that zero_grad() has cleared before its "
                "optimizer.step(): there was no update that the learning rate could follow. If an "
                "optimizer steps another one inside, as SAM does, use optimizer.step(closure)."
            )
        # Before the first gradient, a script brings its schedule to where it should begin.
        if is_late or self._outcome == "done" or not self._has_started:
            self._is_schedule_due = False
            self._move_schedule(step)
        elif self.is_unused:
            self._schedule = step
