"""The verbs of a user's own training loop: ``backward``, ``step``, ``accumulate``.

``backward`` decides *when* an update happens, by counting micro-batches. ``optimizer.step()``,
``lr_scheduler.step()`` and ``zero_grad()`` do nothing while gradients are being accumulated, so the
same loop works for any global batch size, and either order of the two ``step`` calls gives the same
learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rapidformer.accel.tensor.check import check_whole_gradients, get_own_gradient
from rapidformer.accel.tensor.joined_loss import join_loss
from rapidformer.accel.unpad.on_demand import settle
from rapidformer.data.update import MicroBatch, MicroBatchResult
from rapidformer.dist.heartbeat import beat
from rapidformer.engine.weighing import WeighingRun
from rapidformer.errors import ModelError, RapidformerError
from rapidformer.log import warn_once
from rapidformer.optim.gradients import add_gradients, scale_loss, take_gradients
from rapidformer.optim.observer import get_observer
from rapidformer.optim.update import MeasureNorm


@dataclass
class StartedMicroBatch:
    """The micro-batch whose forward step runs."""

    micro_batch: MicroBatch
    has_run: bool = False
    """Whether the step has run a backward pass itself."""
    is_last: bool = False
    fraction: float | torch.Tensor = 0.0


class BackwardRun(WeighingRun):
    """Backward passes, and when they end an update."""

    _first_update = 0
    _started: StartedMicroBatch | None = None

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Back-propagate a micro-batch's mean loss.

        ``weight`` is what the mean was taken over (label tokens or samples); without it, the labels
        of the batch that the training loader handed out last are counted. After the last
        micro-batch of an update, gradients are those of the mean over the whole global batch.
        """
        if self.parallelized.pipeline is not None:
            raise RapidformerError(
                "a model that is split into stages (--pipeline-model-parallel-size) runs forward "
                "and backward passes of several micro-batches at once: use engine.run_update(), "
                "Finetuner or PreTrainer instead of engine.backward()."
            )
        get_observer().see_phase("forward")
        loss = settle(loss)
        in_hand = self._own_loop.in_training
        is_given = weight is not None
        if in_hand is not None and in_hand.is_filler:
            weight = 0.0
        elif weight is None:
            weight = self.count_labels(in_hand)
        result = MicroBatchResult(loss=loss, weight=weight, is_weight_given=is_given)
        self._back_propagate(result, in_hand, ends_update=bool(in_hand and in_hand.is_last))

    def _back_propagate(
        self, result: MicroBatchResult, micro_batch: MicroBatch | None, *, ends_update: bool
    ) -> None:
        is_last, fraction = self._count_micro_batch(result, micro_batch, ends_update=ends_update)
        self._run_backward(result.loss, fraction, is_last=is_last)
        self.clock.add_loss(result.loss, fraction)
        if is_last:
            beat("update")
            self._finish_gradients()

    def _count_micro_batch(
        self, result: MicroBatchResult, micro_batch: MicroBatch | None, *, ends_update: bool
    ) -> tuple[bool, float | torch.Tensor]:
        """Whether it is the last one of its update, and its fraction of the update."""
        info = micro_batch.info if micro_batch is not None else None
        weight = result.weight
        get_observer().see_loss(result.loss, weight, info, is_given=result.is_weight_given)
        is_last = self.clock.start_micro_batch(ends_update=ends_update)
        return is_last, self.clock.add_weight(weight, shared_unit=self._get_shared_unit(weight))

    def _run_backward(
        self, loss: torch.Tensor, fraction: float | torch.Tensor, *, is_last: bool
    ) -> None:
        loss = join_loss(loss)
        if isinstance(loss, DTensor):
            raise ModelError(
                "the loss contains weights that are split over ranks (a penalty over "
                "model.parameters(), say). Gather each of them in the loss: "
                "sum(engine.gather_weight(p).pow(2).sum() for p in model.parameters())."
            )
        scale = self.scaler.scale if self.scaler else 1.0
        synchronizer = self.parallelized.synchronizer
        beat("backward", self.clock.updates + 1)
        synchronizer.before_backward(is_last)
        self.parallelized.backward(scale_loss(loss, fraction, scale))
        synchronizer.after_backward()
        get_observer().see_phase("backward")

    def backward_within(self, loss: torch.Tensor) -> None:
        """Back-propagate inside the forward step of ``run_update``; several losses add up.

        For steps that need the gradient of one loss to compute the next (adversarial training).
        """
        started = self._started
        if started is None:
            raise RapidformerError("backward_within() is for the forward step of run_update().")
        loss = settle(loss)
        earlier: list[torch.Tensor | None] = []
        if not started.has_run:
            micro_batch = started.micro_batch
            weight = 0.0 if micro_batch.is_filler else self.count_labels(micro_batch)
            result = MicroBatchResult(loss=loss, weight=weight, is_weight_given=False)
            started.is_last, started.fraction = self._count_micro_batch(
                result, micro_batch, ends_update=False
            )
            started.has_run = True
        elif started.is_last:
            # What is there has been summed over the ranks already.
            if self.parallelized.deepspeed is not None:
                raise RapidformerError(
                    "DeepSpeed takes one backward pass per micro-batch, and this step runs a "
                    "second one: use --zero-1-memory-optimization, -2- or -3- instead of a "
                    "DeepSpeed file."
                )
            earlier = take_gradients(self._parameters)
        self._run_backward(loss, started.fraction, is_last=started.is_last)
        self.clock.add_loss(loss, started.fraction)
        if earlier:
            add_gradients(self._parameters, earlier)

    def _finish_gradients(
        self, measure: Callable[[MeasureNorm], torch.Tensor] | None = None
    ) -> None:
        self.clock.finish_gradients(self._parameters, self.scaler, measure)
        has_changed = self._notice_unfrozen()
        group = self.topology.get_group("tensor")
        if group is not None and (has_changed or self.clock.updates == self._first_update):
            deepspeed = self.parallelized.deepspeed
            read = get_own_gradient if deepspeed is None else deepspeed.gather_gradient
            check_whole_gradients(self.parallelized.model, group, read)

    def _notice_unfrozen(self) -> bool:
        """Whether parameters were frozen or unfrozen since the last update; warn of idle ones."""
        trainable = [p.requires_grad for p in self._parameters]
        if trainable == self._trainable:
            return False
        self._trainable = trainable
        assert self.optimizer is not None
        if self.parallelized.deepspeed is not None:
            raise RapidformerError(
                "parameters were frozen or unfrozen after compose(), but DeepSpeed divides the "
                "trainable ones among the ranks when it starts: choose them before compose(), or "
                "use --zero-1-memory-optimization, -2- or -3- instead of a DeepSpeed file."
            )
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        idle = [p for p in self._parameters if p.requires_grad and id(p) not in held]
        if idle:
            warn_once(
                f"{len(idle)} parameters were unfrozen after compose(), but the optimizer does not "
                "hold them, so they are not updated. Pass compose() an optimizer over all "
                "parameters, frozen ones included: torch.optim.AdamW(model.parameters(), ...).",
                is_local=True,
            )
        return True

    def step(self) -> None:
        """Update, advance the learning rate and clear the gradients, if an update is due."""
        if self.optimizer is None or self.lr_scheduler is None:
            raise RapidformerError("call engine.compose(model=...) first.")
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()

    def clip_grad_norm(self, max_norm: float | None = None) -> torch.Tensor | None:
        """Clip now and return the norm before clipping; None while gradients are accumulated.

        ``optimizer.step()`` clips by ``--clip-grad`` itself if this was not called.
        """
        return self.clock.clip(self.args.clip_grad if max_norm is None else max_norm)

    @contextmanager
    def gradients_by_row(self) -> Iterator[None]:
        """Allow a gradient penalty on several data-parallel ranks.

        For ``torch.autograd.grad(outputs.sum(), inputs, create_graph=True)`` and the like, where
        each row's gradient depends on that row alone.
        """
        before, self._is_by_row = self._is_by_row, True
        try:
            yield
        finally:
            self._is_by_row = before

    def gather_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter that ZeRO or tensor parallelism has split, for use in a loss.

        Every rank must call it, for the same parameters in the same order. The gradient is that of
        one process. A parameter that is whole is returned as it is.
        """
        return self.parallelized.gather_weight(parameter)

    @contextmanager
    def accumulate(self, is_last: bool = False) -> Iterator[None]:
        """Decide yourself whether the ``backward`` inside ends an update."""
        before = self.clock.forced
        self.clock.forced = is_last
        try:
            yield
        finally:
            self.clock.forced = before

    def no_sync(self) -> Any:
        """Accumulate: the ``backward`` inside does not end an update."""
        return self.accumulate(is_last=False)
