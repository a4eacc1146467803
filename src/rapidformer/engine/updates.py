"""Updates of a run: the loss contract, backward passes, the step, and what replays them as a graph.

``backward`` decides *when* an update happens, by counting micro-batches. ``optimizer.step()``,
``lr_scheduler.step()`` and ``zero_grad()`` do nothing while gradients are being accumulated, so the
same loop works for any global batch size, and either order of the two ``step`` calls gives the same
learning rates. ``run_update`` counts nothing: an update carries its micro-batches.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rapidformer.accel.cuda_graph.graphs import GraphedPasses
from rapidformer.accel.cuda_graph.passes import GraphedUpdate
from rapidformer.accel.cuda_graph.permission import MayCapture
from rapidformer.accel.cuda_graph.recorder import CudaCapture
from rapidformer.accel.data_parallel import GradientReducer
from rapidformer.accel.parallelize import Parallelized
from rapidformer.accel.pipeline.pipeline import Pipeline
from rapidformer.accel.sharding.zero import ShardedGradients
from rapidformer.accel.unpad.calls import count_steps
from rapidformer.accel.unpad.on_demand import settle
from rapidformer.accel.unpad.promises import reading_no_padding
from rapidformer.config import Settings
from rapidformer.data.update import MicroBatchResult, Update, UpdatePreparation, move_micro_batch
from rapidformer.dist.heartbeat import beat
from rapidformer.engine.backward import BackwardPasses, LossWeights, StartedMicroBatch, join
from rapidformer.engine.current_batch import CurrentBatch
from rapidformer.engine.optimizing import (
    Wanted,
    build_guard,
    build_scaler,
    prepare_optimizer,
    prepare_scheduler,
    report_skipped,
    take_over,
    uses_plain_gradients,
)
from rapidformer.engine.runtime import Runtime
from rapidformer.errors import RapidformerError
from rapidformer.log import get_logger
from rapidformer.models.work import ModelWork
from rapidformer.optim.gradients import scale_loss, take_gradients
from rapidformer.optim.guard import RecentValues
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW
from rapidformer.optim.observer import get_observer
from rapidformer.optim.update import UpdateClock
from rapidformer.overlay import find_fact

Forward = Callable[[Any], Any]
_MOST_COPIED = 2**31
"""In bytes of gradients: above, launching the kernels of an update costs little beside them."""
_MOST_REFUSED = 3
"""How often an update may turn out not to be recordable before none is tried any more."""


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
        self._graphed_update: GraphedUpdate | None = None
        self._compiles_update = False
        self._refused_in_graph = 0

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
        self.graphs = self._build_graphs(parallelized, parameters, work)
        if isinstance(optimizer, MultiTensorAdamW):
            self._graphed_update = GraphedUpdate(optimizer, self.clip_grad, runtime.device)

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
        ends_update = bool(micro_batch and micro_batch.is_last)
        passes.run(result, micro_batch, ends_update=ends_update, retain_graph=retain_graph)

    def backward_with(
        self,
        others: Sequence[Updates],
        loss: torch.Tensor,
        *,
        counts: bool,
        retain_graph: bool = False,
    ) -> list[Updates]:
        """Back-propagate a loss that may depend on the models of several engines.

        Returns those that it has reached; the others are as before. Each pass ends an update,
        unless it ``counts`` as a micro-batch.
        """
        loss, together = settle(loss), [self, *others]
        micro_batch = self.weights.find_micro_batch(None)
        result = self.weights.weigh(loss, None, micro_batch)
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

    @contextmanager
    def accumulate(self, is_last: bool = False) -> Iterator[None]:
        """Decide yourself whether the ``backward`` inside ends an update."""
        before, self.clock.forced = self.clock.forced, is_last
        try:
            yield
        finally:
            self.clock.forced = before

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
        pipeline = passes.parallelized.pipeline
        with self._releasing_weights():
            if pipeline is not None:
                results = self._run_pipelined(passes, pipeline, forward, update)
            elif (graphed := self._run_graphed(passes, forward, update, steps_at_once)) is not None:
                results = graphed
            else:
                results = self._run_in_turn(passes, forward, update, after_micro_batch)
                after_micro_batch = None  # it has been called
                self._finish_in_graph(passes, self._find_graphed_update(steps_at_once))
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
            with self.accumulate(is_last=is_last):
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

    def _run_graphed(
        self, passes: BackwardPasses, forward: Forward, update: Update, steps_at_once: bool
    ) -> list[MicroBatchResult] | None:
        """Replay the passes; None if they must run one by one."""
        if self.graphs is None:
            return None
        beat("forward", self.clock.updates + 1)
        graphed_update = self._find_graphed_update(steps_at_once)
        is_padding_left = getattr(forward, "reads_no_padding", False)
        with reading_no_padding() if is_padding_left else nullcontext():
            outcome = self.graphs.run(
                functools.partial(self.weights.run_forward, forward),
                update,
                getattr(forward, "steps", (forward,)),
                graphed_update,
            )
        if outcome is None:
            return None
        get_observer().see_phase("forward")
        for micro_batch, result in zip(update, outcome.results, strict=True):
            with self.accumulate(is_last=micro_batch is update[-1]):
                _, fraction = passes.count(result, micro_batch)
            self.clock.add_loss(result.loss, fraction)
        get_observer().see_phase("backward")
        beat("update")
        # In the order of passes that run one by one: other ranks may do so in this update.
        sums = self.graphs.sum_gradients(outcome)
        if sums is not None:
            self._finish_sums(passes, sums, graphed_update)
            return outcome.results
        self.clock.sum_weights(self._runtime.device)
        assert outcome.norm is not None
        if outcome.gradients is not None:
            _assign(passes.parameters, outcome.gradients)
        self.clock.take_finished(
            passes.parameters,
            outcome.norm,
            is_applied=outcome.gradients is None,
            may_change=not steps_at_once,
        )
        passes.notice_unfrozen()
        return outcome.results

    def _find_graphed_update(self, steps_at_once: bool) -> GraphedUpdate | None:
        """What updates weights inside a graph; None if something looks at the gradients before."""
        is_plain = steps_at_once and uses_plain_gradients(self.clock, self.optimizer, self.scaler)
        return self._graphed_update if is_plain else None

    def _finish_sums(
        self, passes: BackwardPasses, sums: list[Tensor | None], graphed: GraphedUpdate | None
    ) -> None:
        """Make a mean of sums over ranks, and update the weights if that may be in a graph."""
        assert self.graphs is not None
        finishing = self.graphs.finishing
        if graphed is None or not finishing.prepare(sums, graphed):
            _assign(finishing.parameters, sums)
            passes.finish()
            return
        norm = finishing.run(self.clock.sum_weights(self._runtime.device))
        self.clock.take_finished(passes.parameters, norm, is_applied=True, may_change=False)
        passes.notice_unfrozen()

    def _finish_in_graph(self, passes: BackwardPasses, graphed: GraphedUpdate | None) -> None:
        """Update the weights with finished gradients, after passes inside the user's own code."""
        graphs = self.graphs
        may_try = self._refused_in_graph < _MOST_REFUSED and self.clock.is_unused
        if graphs is None or graphed is None or not may_try:
            return
        pieces, finishing = graphs.in_pieces, graphs.finishing
        if pieces is None or pieces.problem is not None:
            return
        gradients = take_gradients(passes.parameters)
        size = sum(gradient.nbytes for gradient in gradients if gradient is not None)
        try:
            is_ready = size <= _MOST_COPIED
            is_ready = is_ready and finishing.prepare(finishing.place(gradients), graphed)
        except torch.OutOfMemoryError:
            finishing.forget()
            self._refused_in_graph, is_ready = _MOST_REFUSED, False
        if not is_ready:
            self._refused_in_graph += 1
            _assign(passes.parameters, gradients)
            return
        norm = finishing.run(1.0)
        pieces.end()  # graphs share their memory
        self.clock.take_finished(passes.parameters, norm, is_applied=True, may_change=False)

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

    def _build_graphs(
        self, parallelized: Parallelized, parameters: Sequence[nn.Parameter], work: ModelWork | None
    ) -> GraphedPasses | None:
        model, synchronizer = parallelized.model, parallelized.synchronizer
        allowed = find_fact(model, MayCapture)
        if allowed is None:
            return None
        device = self._runtime.device
        compiles = parallelized.wants("compilation")
        capture = CudaCapture(device, compiles=compiles)
        placed = (
            synchronizer.place_weights() if isinstance(synchronizer, ShardedGradients) else None
        )
        graphs = GraphedPasses(
            model, placed.parameters if placed else parameters, device, capture,
            self.weights.count_labels,
            is_asked=allowed.is_asked, is_16_bit=self._runtime.precision.dtype is not None,
            compiles=compiles, work=work, topology=self._runtime.topology,
            exchange=synchronizer if isinstance(synchronizer, GradientReducer) else placed,
            blocks=parallelized.plan.get_blocks(model) if allowed.in_pieces else (),
        )  # fmt: skip
        row = parallelized.applied.get_row("CUDA graph")
        row.find_obstacle = functools.partial(_find_graph_problem, weakref.ref(graphs))
        return graphs

    def close(self) -> None:
        """Let go of model, optimizer and graphs."""
        if self.graphs is not None:
            self.graphs.close()
        self.graphs = self._graphed_update = self._passes = None
        self.optimizer = self.lr_scheduler = None
        self.clock.guard = self.clock.keeper = self.clock.on_bad_update = None


def _find_graph_problem(reference: weakref.ref[GraphedPasses]) -> str | None:
    graphs = reference()
    return None if graphs is None else graphs.obstacle


def _assign(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
