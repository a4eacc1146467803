"""Backward passes: from a micro-batch's mean loss to the gradient of the mean over its update.

Every micro-batch back-propagates a sum. After the last one of an update, gradients are summed over
the ranks and divided once, by the weight of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rapidformer.accel.parallelize import Parallelized
from rapidformer.accel.tensor.check import check_whole_gradients, get_own_gradient
from rapidformer.accel.tensor.joined_loss import join_loss
from rapidformer.accel.unpad.on_demand import settle
from rapidformer.data.update import MicroBatch, MicroBatchResult
from rapidformer.dist.heartbeat import beat
from rapidformer.dist.topology import Topology
from rapidformer.engine.weighing import LossWeights
from rapidformer.errors import ModelError, RapidformerError
from rapidformer.log import warn_once
from rapidformer.optim.gradients import add_gradients, scale_loss, take_gradients
from rapidformer.optim.loss_scaler import LossScaler
from rapidformer.optim.observer import get_observer
from rapidformer.optim.update import MeasureNorm, UpdateClock


@dataclass
class StartedMicroBatch:
    """The micro-batch whose forward step runs."""

    micro_batch: MicroBatch
    has_run: bool = False
    """Whether the step has run a backward pass itself."""
    is_last: bool = False
    fraction: float | torch.Tensor = 0.0


class BackwardPasses:
    """Back-propagates losses and finishes gradients."""

    def __init__(
        self,
        parallelized: Parallelized,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        *,
        topology: Topology,
        clock: UpdateClock,
        weights: LossWeights,
        scaler: LossScaler | None,
    ) -> None:
        self.started: StartedMicroBatch | None = None
        """The micro-batch whose forward step runs, for ``run_within``."""
        self._parallelized, self._parameters, self._optimizer = parallelized, parameters, optimizer
        self._topology, self._clock, self._weights = topology, clock, weights
        self._scaler = scaler
        self._trainable = [p.requires_grad for p in parameters]

    def run(
        self, result: MicroBatchResult, micro_batch: MicroBatch | None, *, ends_update: bool
    ) -> None:
        """Back-propagate a micro-batch's loss; finish the gradient after the last of its update."""
        is_last, fraction = self.count(result, micro_batch, ends_update=ends_update)
        self._back_propagate(result.loss, fraction, is_last=is_last)
        if is_last:
            beat("update")
            self.finish()

    def count(
        self, result: MicroBatchResult, micro_batch: MicroBatch | None, *, ends_update: bool = False
    ) -> tuple[bool, float | torch.Tensor]:
        """Whether it is the last one of its update, and its fraction of the update."""
        info = micro_batch.info if micro_batch is not None else None
        weight = result.weight
        get_observer().see_loss(result.loss, weight, info, is_given=result.is_weight_given)
        is_last = self._clock.start_micro_batch(ends_update=ends_update)
        unit = self._weights.get_shared_unit(weight)
        return is_last, self._clock.add_weight(weight, shared_unit=unit)

    def _back_propagate(
        self, loss: torch.Tensor, fraction: float | torch.Tensor, *, is_last: bool
    ) -> None:
        joined = join_loss(loss)
        if isinstance(joined, DTensor):
            raise ModelError(
                "the loss contains weights that are split over ranks (a penalty over "
                "model.parameters(), say). Gather each of them in the loss: "
                "sum(engine.model.gather_weight(p).pow(2).sum() for p in model.parameters())."
            )
        scale = self._scaler.scale if self._scaler else 1.0
        synchronizer = self._parallelized.synchronizer
        beat("backward", self._clock.updates + 1)
        synchronizer.before_backward(is_last)
        self._parallelized.backward(scale_loss(joined, fraction, scale))
        synchronizer.after_backward()
        get_observer().see_phase("backward")
        self._clock.add_loss(loss, fraction)

    def run_within(self, loss: torch.Tensor) -> None:
        """Back-propagate inside the forward step of an update; several losses add up."""
        started = self.started
        if started is None:
            raise RapidformerError("backward_within() is for the forward step of run_update().")
        loss = settle(loss)
        earlier: list[torch.Tensor | None] = []
        if not started.has_run:
            result = self._weights.weigh(loss, None, started.micro_batch)
            started.is_last, started.fraction = self.count(result, started.micro_batch)
            started.has_run = True
        elif started.is_last:
            # What is there has been summed over the ranks already.
            if self._parallelized.deepspeed is not None:
                raise RapidformerError(
                    "DeepSpeed takes one backward pass per micro-batch, and this step runs a "
                    "second one: use --zero-1-memory-optimization, -2- or -3- instead of a "
                    "DeepSpeed file."
                )
            earlier = take_gradients(self._parameters)
        self._back_propagate(loss, started.fraction, is_last=started.is_last)
        if earlier:
            add_gradients(self._parameters, earlier)

    def finish(self, measure: Callable[[MeasureNorm], torch.Tensor] | None = None) -> None:
        """Make the sums in ``.grad`` the gradient of the update, and check it on the first one.

        ``measure`` is for a gradient of which other pipeline stages hold parts.
        """
        self._clock.finish_gradients(self._parameters, self._scaler, measure)
        has_changed = self.notice_unfrozen()
        group = self._topology.get_group("tensor")
        if group is not None and (has_changed or self._clock.is_first_update):
            deepspeed = self._parallelized.deepspeed
            read = get_own_gradient if deepspeed is None else deepspeed.gather_gradient
            check_whole_gradients(self._parallelized.model, group, read)

    def notice_unfrozen(self) -> bool:
        """Whether parameters were frozen or unfrozen since the last update; warn of idle ones."""
        trainable = [p.requires_grad for p in self._parameters]
        if trainable == self._trainable:
            return False
        self._trainable = trainable
        if self._parallelized.deepspeed is not None:
            raise RapidformerError(
                "parameters were frozen or unfrozen after compose(), but DeepSpeed divides the "
                "trainable ones among the ranks when it starts: choose them before compose(), or "
                "use --zero-1-memory-optimization, -2- or -3- instead of a DeepSpeed file."
            )
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        idle = [p for p in self._parameters if p.requires_grad and id(p) not in held]
        if idle:
            warn_once(
                f"{len(idle)} parameters were unfrozen after compose(), but the optimizer does not "
                "hold them, so they are not updated. Pass compose() an optimizer over all "
                "parameters, frozen ones included: torch.optim.AdamW(model.parameters(), ...).",
                is_local=True,
            )
        return True
