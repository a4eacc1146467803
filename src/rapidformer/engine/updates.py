"""The verbs of training: ``backward`` in the user's own loop, ``run_update`` in ours.

``backward`` decides *when* an update happens, by counting micro-batches. ``optimizer.step()``,
``lr_scheduler.step()`` and ``zero_grad()`` do nothing while gradients are being accumulated, so the
same loop works for any global batch size, and either order of the two ``step`` calls gives the same
learning rates. ``run_update`` needs no such state: an update carries its micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rapidformer.accel.cuda_graph.capture import CudaCapture
from rapidformer.accel.cuda_graph.switch import MayCapture
from rapidformer.accel.pipeline.pipeline import Pipeline
from rapidformer.accel.tensor.check import check_whole_gradients, get_own_gradient
from rapidformer.accel.tensor.joined_loss import join_loss
from rapidformer.compat.torch_optimizers import has_hooks
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.prefetch import move_micro_batch
from rapidformer.data.update import MicroBatch, MicroBatchResult, Update
from rapidformer.dist.heartbeat import beat
from rapidformer.engine.graphed_update import GraphedUpdate
from rapidformer.engine.graphs import GraphedPasses
from rapidformer.engine.weighing import WeighingRun
from rapidformer.errors import ModelError, RapidformerError
from rapidformer.log import warn_once
from rapidformer.optim.gradients import add_gradients, scale_loss, take_gradients
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW
from rapidformer.optim.observer import RunObserver, get_observer
from rapidformer.optim.update import MeasureNorm
from rapidformer.overlay import find_fact


@dataclass
class _StartedMicroBatch:
    """The micro-batch whose forward step runs."""

    micro_batch: MicroBatch
    has_run: bool = False
    """Whether the step has run a backward pass itself."""
    is_last: bool = False
    fraction: float | torch.Tensor = 0.0


class UpdatingRun(WeighingRun):
    """Forward and backward passes, and the updates they make."""

    _first_update = 0
    _compiles_update = False
    _started: _StartedMicroBatch | None = None

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

    def iterate_updates(
        self, loader: DistributedLoader, *, moves_later: bool = False
    ) -> Iterator[Update]:
        """The updates of an epoch, for ``run_update``.

        With ``moves_later``, batches may still be in host memory: ``run_update`` moves them.
        """
        if self._train_loader is None:
            self._train_loader = loader
        # A graph's inputs are copied to their places straight from the host.
        return _observe_wait(loader.iterate_updates(self._may_replay if moves_later else None))

    def _may_replay(self) -> bool:
        return self.graphs is not None and self.graphs.problem is None

    def run_update(
        self,
        forward: Callable[[Any], Any],
        update: Update,
        after_micro_batch: Callable[[], None] | None = None,
        *,
        steps_at_once: bool = False,
    ) -> list[MicroBatchResult]:
        """Forward and backward of all micro-batches of one update; ``step`` comes next.

        ``forward(batch)`` returns the mean loss, or ``(loss, weight)``. Every loop of the library
        trains this way, and it is the only way to train a model that is split into stages
        (``--pipeline-model-parallel-size``). ``after_micro_batch`` is called after each of them but
        the last; those of a pipeline or a CUDA graph are all under way at once, so there it is
        called after them all. ``steps_at_once`` says that nothing looks at the gradients before
        ``step``: a CUDA graph may then update the weights, too.
        """
        self._compile_update()
        pipeline = self.parallelized.pipeline
        if pipeline is None:
            results = self._run_graphed(forward, update, steps_at_once=steps_at_once)
            if results is None:
                return self._run_in_turn(forward, update, after_micro_batch)
        else:
            results = self._run_pipelined(pipeline, forward, update)
        if after_micro_batch is not None:
            for _ in range(len(update) - 1):
                after_micro_batch()
        return results

    def _compile_update(self) -> None:
        """Compile the optimizer's kernels during the first passes."""
        if not self._compiles_update and isinstance(self.optimizer, MultiTensorAdamW):
            self._compiles_update = True
            self.optimizer.start_trials()

    def _run_in_turn(
        self,
        forward: Callable[[Any], Any],
        update: Update,
        after_micro_batch: Callable[[], None] | None,
    ) -> list[MicroBatchResult]:
        results = []
        for number, micro_batch in enumerate(update, 1):
            is_last = number == len(update)
            if micro_batch.is_on_host:
                micro_batch = move_micro_batch(micro_batch, self.device)
            beat("forward", self.clock.updates + 1)
            with self.accumulate(is_last=is_last):
                started = self._started = _StartedMicroBatch(micro_batch)
                result = self.run_forward(forward, micro_batch)
                get_observer().see_phase("forward")
                self._started = None
                if not started.has_run:
                    self._back_propagate(result, micro_batch, ends_update=False)
                elif started.is_last:
                    beat("update")
                    self._finish_gradients()
            results.append(replace(result, loss=result.loss.detach()))
            if after_micro_batch is not None and not is_last:
                after_micro_batch()
        return results

    @functools.cached_property
    def graphs(self) -> GraphedPasses | None:
        """What replays the passes of an update; None if nothing may."""
        allowed = find_fact(self.parallelized.model, MayCapture)
        if allowed is None:
            return None
        return GraphedPasses(
            self.parallelized.model,
            self._parameters,
            self.device,
            CudaCapture(self.device),
            self.count_labels,
            is_asked=allowed.is_asked,
            is_16_bit=self.precision.dtype is not None,
            compiles=self.args.compile,
            work=self.work,
        )

    @functools.cached_property
    def _graphed_update(self) -> GraphedUpdate | None:
        """How the optimizer works inside a graph; None if it cannot."""
        if not isinstance(self.optimizer, MultiTensorAdamW):
            return None
        return GraphedUpdate(self.optimizer, self.args.clip_grad, self.device)

    def _can_update_in_graph(self) -> bool:
        """Whether nothing but the optimizer's own step happens to a finished gradient."""
        clock, optimizer = self.clock, self.optimizer
        assert optimizer is not None
        is_plain = clock.guard is None and clock.keeper is None and self.scaler is None
        is_watched = has_hooks(optimizer) or type(get_observer()) is not RunObserver
        return is_plain and not is_watched and "step" not in vars(optimizer)

    def _run_graphed(
        self, forward: Callable[[Any], Any], update: Update, *, steps_at_once: bool
    ) -> list[MicroBatchResult] | None:
        """Replay the passes; None if they must run one by one."""
        if self.graphs is None:
            return None
        beat("forward", self.clock.updates + 1)
        steps = getattr(forward, "steps", (forward,))
        updates = steps_at_once and self._can_update_in_graph()
        outcome = self.graphs.run(
            functools.partial(self.run_forward, forward),
            update,
            steps,
            self._graphed_update if updates else None,
        )
        if outcome is None:
            return None
        get_observer().see_phase("forward")
        for micro_batch, result in zip(update, outcome.results, strict=True):
            with self.accumulate(is_last=micro_batch is update[-1]):
                _, fraction = self._count_micro_batch(result, micro_batch, ends_update=False)
            self.clock.add_loss(result.loss, fraction)
        get_observer().see_phase("backward")
        beat("update")
        if outcome.gradients is None:
            self.clock.take_applied(outcome.norm)
        else:
            for parameter, gradient in zip(self._parameters, outcome.gradients, strict=True):
                parameter.grad = gradient
            held = [gradient for gradient in outcome.gradients if gradient is not None]
            self.clock.take_finished(held, outcome.norm)
        self._notice_unfrozen()
        return outcome.results

    def _run_pipelined(
        self, pipeline: Pipeline, forward: Callable[[Any], Any], update: Update
    ) -> list[MicroBatchResult]:
        count = len(update)
        for _ in update:
            self.clock.start_micro_batch(ends_update=False)
        if self.scaler is not None and self.scaler.weight_unit is None:
            self.scaler.agree_on_unit(float(update[0].info.labels))
        unit = (self.scaler.weight_unit if self.scaler else None) or 1.0
        scale = self.scaler.scale if self.scaler else 1.0

        def compute(number: int) -> tuple[torch.Tensor, MicroBatchResult]:
            result = self.run_forward(forward, update[number])
            return scale_loss(result.loss, result.weight / unit, scale), result

        beat("pipeline", self.clock.updates + 1)
        pipeline.run(
            compute,
            count,
            step=self.clock.updates,
            synchronizer=self.parallelized.synchronizer,
        )
        get_observer().see_phase("pipeline")
        beat("update")
        results = pipeline.broadcast_results(count)
        for each, result in zip(update, results, strict=True):
            # Only the last stage knows who gave the weight.
            get_observer().see_loss(result.loss, result.weight, each.info, is_given=True)
            self.clock.add_loss(result.loss, result.weight / unit)
        self.clock.set_weight(torch.stack([torch.as_tensor(r.weight) for r in results]).sum(), unit)
        self._finish_gradients(pipeline.measure_norm)
        return results

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


def _observe_wait(updates: Iterator[Update]) -> Iterator[Update]:
    """Report when the wait for data begins and ends."""
    while True:
        get_observer().see_phase("loop")
        update = next(updates, None)
        if update is None:
            return
        get_observer().see_phase("data")
        yield update
