"""Updates of a run: the loss contract, backward passes and the step; ``replay.py`` has graphs.

``backward`` decides *when* an update happens, by counting micro-batches. ``optimizer.step()``,
``lr_scheduler.step()`` and ``zero_grad()`` do nothing while gradients are being accumulated, so the
same loop works for any global batch size, and either order of the two ``step`` calls gives the same
learning rates. ``run_update`` counts nothing: an update carries its micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rapidformer.accel.cuda_graph.graphs import GraphedPasses
from rapidformer.accel.cuda_graph.own_loop import OwnLoop
from rapidformer.accel.cuda_graph.passes import GraphedUpdate
from rapidformer.accel.parallelize import Parallelized
from rapidformer.accel.pipeline.pipeline import Pipeline
from rapidformer.accel.unpad.calls import count_steps
from rapidformer.accel.unpad.on_demand import settle
from rapidformer.config import Settings
from rapidformer.data.update import MicroBatchResult, Update, UpdatePreparation, move_micro_batch
from rapidformer.dist.heartbeat import beat
from rapidformer.engine.backward import BackwardPasses, StartedMicroBatch, join
from rapidformer.engine.current_batch import CurrentBatch
from rapidformer.engine.optimizing import (
    Wanted,
    build_guard,
    build_scaler,
    prepare_optimizer,
    prepare_scheduler,
    report_skipped,
    take_over,
)
from rapidformer.engine.replay import Replay, build_graphs
from rapidformer.engine.runtime import Runtime
from rapidformer.engine.weights import LossWeights
from rapidformer.errors import RapidformerError
from rapidformer.log import get_logger
from rapidformer.models.work import ModelWork
from rapidformer.optim.gradients import scale_loss
from rapidformer.optim.guard import RecentValues
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW
from rapidformer.optim.observer import get_observer
from rapidformer.optim.update import UpdateClock

Forward = Callable[[Any], Any]


class Updates:
    """Losses in, updated weights out; ``start`` gives it a model and an optimizer."""

    def __init__(
        self, args: Settings, runtime: Runtime, clock: UpdateClock, current: CurrentBatch
    ) -> None:
        self.args = args
        self.clock = clock
        self.scaler = build_scaler(args) if runtime.precision.needs_loss_scaling else None
        self.weights = LossWeights(runtime.topology, clock, current, self.scaler)
        self.recent_values = RecentValues(args.loss_spike_threshold)
        self.optimizer: Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self.graphs: GraphedPasses | None = None
        """What replays the passes of an update; None if nothing may."""
        self.is_own_loop = True
        """Whether the script drives the training itself; templates set this to False."""
        self.has_own_parts = True
        """Whether optimizer and schedule are the script's own if they are passed; False for a
        caller that creates them from the settings itself."""
        self.has_own_optimizer = self.has_own_schedule = False
        """Whether the settings do not describe them."""
        self._runtime, self._current = runtime, current
        self._passes: BackwardPasses | None = None
        self._replay: Replay | None = None
        self._compiles_update = False
        self._own_loop: OwnLoop | None = None

    def start(
        self,
        wanted: Wanted,
        parallelized: Parallelized,
        parameters: Sequence[nn.Parameter],
        names: Mapping[int, str],
        *,
        work: ModelWork | None = None,
        shifts_labels: bool = False,
        list_samples: Callable[[], list[int]] = list,
    ) -> None:
        """Take over optimizer and schedule, or build them; updates may begin."""
        args, runtime, clock = self.args, self._runtime, self.clock
        self.weights.shifts_labels = shifts_labels
        if self.has_own_parts:
            self.has_own_optimizer = wanted.optimizer is not None
            self.has_own_schedule = wanted.schedule is not None
        optimizer = prepare_optimizer(wanted, parallelized, names, args, runtime, clock)
        scheduler = prepare_scheduler(wanted, optimizer, parallelized, args)
        take_over(optimizer, scheduler, parallelized, self.clip_grad, clock, self.scaler)
        count_steps(parallelized.model, clock)
        self.optimizer, self.lr_scheduler = optimizer, scheduler
        self._passes = BackwardPasses(
            parallelized, parameters, optimizer, runtime.topology, clock, self.weights, self.scaler
        )
        clock.guard = build_guard(
            self.recent_values, parallelized.model, optimizer, args, runtime, self.is_own_loop
        )
        if clock.guard is not None and self.is_own_loop:
            clock.on_bad_update = functools.partial(
                report_skipped, clock, list_samples, runtime.is_main
            )
        self.graphs = build_graphs(parallelized, parameters, self.weights, runtime, work)
        update = None
        if isinstance(optimizer, MultiTensorAdamW):
            update = GraphedUpdate(optimizer, self.clip_grad, runtime.device)
        self._replay = Replay(self._passes, update, runtime.device)

    @property
    def clip_grad(self) -> float:
        """What ``optimizer.step()`` clips to; 0 in a script's own loop with its own optimizer,
        unless it asks for more."""
        is_own = self.is_own_loop and self.has_own_optimizer
        return self.args.clip_grad if self.args.is_given("clip_grad") or not is_own else 0.0

    @property
    def _started_passes(self) -> BackwardPasses:
        if self._passes is None:
            raise RapidformerError("call engine.compose(model=...) first.")
        # Another engine may have taken the model over.
        self._passes.parallelized.applied.check_open()
        return self._passes

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Back-propagate a micro-batch's mean loss; see ``engine.backward``."""
        passes = self._started_passes
        if passes.parallelized.pipeline is not None:
            raise RapidformerError(
                "a model that is split into stages (--pipeline-model-parallel-size) runs forward "
                "and backward passes of several micro-batches at once: use engine.run_update(), "
                "Finetuner or PreTrainer instead of engine.backward()."
            )
        get_observer().see_phase("forward")
        loss = settle(loss)
        micro_batch = self.weights.find_micro_batch(weight)
        result = self.weights.weigh(loss, weight, micro_batch)
        ends_update = bool(micro_batch and micro_batch.must_end)
        passes.run(result, micro_batch, ends_update=ends_update, retain_graph=retain_graph)
        self._follow_own_loop(passes)

    def _follow_own_loop(self, passes: BackwardPasses) -> None:
        if self._own_loop is None and self.graphs is not None:
            self._own_loop = OwnLoop(passes.parallelized.model, self.graphs)
        if self._own_loop is not None:
            self._own_loop.end_pass()

    def backward_with(
        self,
        others: Sequence[Updates],
        loss: torch.Tensor,
        weight: float | torch.Tensor | None = None,
        *,
        counts: bool,
        retain_graph: bool = False,
    ) -> list[Updates]:
        """Back-propagate a loss that may depend on the models of several engines.

        Returns those that it has reached; the others are as before. Each pass ends an update,
        unless it ``counts`` as a micro-batch.
        """
        loss, together = settle(loss), [self, *others]
        micro_batch = self.weights.find_micro_batch(weight)
        result = self.weights.weigh(loss, weight, micro_batch)
        # All of them count in the same unit, whichever update each of them is in.
        unit = self.weights.get_shared_unit(result.weight)
        if unit is None:
            unit = 1.0 if counts else float(result.weight) or 1.0
        with ExitStack() as stack:
            joined = [
                stack.enter_context(
                    updates._started_passes.joining(result, micro_batch, unit, counts=counts)
                )
                for updates in together
            ]
            scaled = scale_loss(join(loss), result.weight / unit, 1.0)
            scaled.backward(retain_graph=retain_graph)
        for updates in together:
            if updates._own_loop is not None:
                updates._own_loop.end_pass()
        return [updates for updates, reached in zip(together, joined, strict=True) if reached]

    def backward_within(self, loss: torch.Tensor) -> None:
        """Back-propagate inside the forward step of ``run_update``; several losses add up.

        For steps that need the gradient of one loss to compute the next (adversarial training).
        """
        self._started_passes.run_within(loss)

    def step(self, after_optimizer: Callable[[], None] | None = None) -> None:
        """Update, advance the learning rate and clear the gradients, if an update is due.

        ``after_optimizer`` is called while the gradients and the learning rate are still there.
        """
        _ = self._started_passes
        assert self.optimizer is not None and self.lr_scheduler is not None
        self.optimizer.step()
        if after_optimizer is not None:
            after_optimizer()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()

    def get_learning_rate(self) -> float:
        """The learning rate of the next update."""
        if self.optimizer is None:
            raise RapidformerError("call engine.compose(model=...) first.")
        return float(self.optimizer.param_groups[0]["lr"])

    def may_replay(self) -> bool:
        """Whether a graph may run the next update: its inputs are copied straight from the host."""
        return self.graphs is not None and self.graphs.problem is None

    def run_update(
        self,
        forward: Forward,
        update: Update,
        after_micro_batch: Callable[[], None] | None = None,
        *,
        steps_at_once: bool = False,
    ) -> list[MicroBatchResult]:
        """Forward and backward of all micro-batches of one update; see ``engine.run_update``."""
        passes = self._started_passes
        if passes.adopt_added() and self.graphs is not None:
            get_logger().info("graphs    given up: the optimizer has parameters that they lack")
            self.graphs.close()
            self.graphs = None
        get_observer().before_update(forward, update)
        if not self._compiles_update and isinstance(self.optimizer, MultiTensorAdamW):
            # Its kernels are compiled during the first passes.
            self._compiles_update = True
            self.optimizer.start_trials()
        if isinstance(forward, UpdatePreparation):
            update = forward.prepare(update, self._runtime.topology, self._runtime.device)
        pipeline, graphs, replay = passes.parallelized.pipeline, self.graphs, self._replay
        assert replay is not None
        results = None
        with self._releasing_weights():
            if pipeline is not None:
                results = self._run_pipelined(passes, pipeline, forward, update)
            elif graphs is not None:
                results = replay.run(graphs, forward, update, steps_at_once=steps_at_once)
            if results is None:
                results = self._run_in_turn(passes, forward, update, after_micro_batch)
                after_micro_batch = None  # it has been called
                if graphs is not None:
                    replay.finish(graphs, steps_at_once=steps_at_once)
        if after_micro_batch is not None:
            for _ in range(len(update) - 1):
                after_micro_batch()
        # Of the update as it was prepared: an objective may have made it longer.
        ran = zip(update, results, strict=True)
        return [replace(result, info=micro_batch.info) for micro_batch, result in ran]

    @contextmanager
    def _releasing_weights(self) -> Iterator[None]:
        """Weights that were gathered for an update are sharded again, even if it fails."""
        try:
            yield
        finally:
            if self.graphs is not None and self.graphs.placed is not None:
                self.graphs.placed.release()

    def _run_in_turn(
        self,
        passes: BackwardPasses,
        forward: Forward,
        update: Update,
        after_micro_batch: Callable[[], None] | None,
    ) -> list[MicroBatchResult]:
        results = []
        in_pieces = self.graphs.in_pieces if self.graphs is not None else None
        for number, micro_batch in enumerate(update, 1):
            is_last = number == len(update)
            if micro_batch.is_on_host:
                micro_batch = move_micro_batch(micro_batch, self._runtime.device)
            beat("forward", self.clock.updates + 1)
            with self.clock.accumulate(is_last=is_last):
                started = passes.started = StartedMicroBatch(micro_batch)
                try:
                    with nullcontext() if in_pieces is None else in_pieces.passing():
                        result = self.weights.run_forward(forward, micro_batch)
                finally:
                    passes.started = None
                get_observer().see_phase("forward")
                if not started.has_run:
                    passes.run(result, micro_batch, ends_update=False)
                elif started.is_last:
                    beat("update")
                    passes.finish()
            results.append(replace(result, loss=result.loss.detach()))
            # It holds nodes of autograd that belong to this stream, and the next pass may record.
            del result, started
            if after_micro_batch is not None and not is_last:
                after_micro_batch()
        return results

    def _run_pipelined(
        self, passes: BackwardPasses, pipeline: Pipeline, forward: Forward, update: Update
    ) -> list[MicroBatchResult]:
        count, scaler = len(update), self.scaler
        for _ in update:
            self.clock.start_micro_batch(ends_update=False)
        if scaler is not None and scaler.weight_unit is None:
            scaler.agree_on_unit(float(update[0].info.labels))
        unit = (scaler.weight_unit if scaler else None) or 1.0
        scale = scaler.scale if scaler else 1.0

        def compute(number: int) -> tuple[torch.Tensor, MicroBatchResult]:
            result = self.weights.run_forward(forward, update[number])
            return scale_loss(result.loss, result.weight / unit, scale), result

        beat("pipeline", self.clock.updates + 1)
        synchronizer = passes.parallelized.synchronizer
        pipeline.run(compute, count, step=self.clock.updates, synchronizer=synchronizer)
        get_observer().see_phase("pipeline")
        beat("update")
        results = pipeline.broadcast_results(count)
        for micro_batch, result in zip(update, results, strict=True):
            # Only the last stage knows who gave the weight.
            get_observer().see_loss(result.loss, result.weight, micro_batch.info, is_given=True)
            self.clock.add_loss(result.loss, result.weight / unit)
        self.clock.set_weight(torch.stack([torch.as_tensor(r.weight) for r in results]).sum(), unit)
        passes.finish(pipeline.measure_norm)
        return results

    def close(self) -> None:
        """Let go of model, optimizer and graphs."""
        if self._own_loop is not None:
            self._own_loop.close()
        if self.graphs is not None:
            self.graphs.close()
        self._own_loop = self.graphs = self._replay = self._passes = None
        self.optimizer = self.lr_scheduler = None
        self.clock.guard = self.clock.keeper = self.clock.on_bad_update = None
