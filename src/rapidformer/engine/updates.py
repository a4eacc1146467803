"""``run_update``: all passes of an update, one by one, replayed as a CUDA graph, or in a pipeline.

Unlike ``backward``, it counts nothing: an update carries its micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from rapidformer.accel.cuda_graph.capture import CudaCapture
from rapidformer.accel.cuda_graph.graphs import GraphedPasses
from rapidformer.accel.cuda_graph.obstacles import MayCapture
from rapidformer.accel.cuda_graph.passes import GraphedUpdate
from rapidformer.accel.pipeline.pipeline import Pipeline
from rapidformer.compat.torch_optimizers import has_hooks
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.prefetch import move_micro_batch
from rapidformer.data.update import MicroBatchResult, Update, UpdatePreparation
from rapidformer.dist.heartbeat import beat
from rapidformer.engine.backward import BackwardRun, StartedMicroBatch
from rapidformer.optim.gradients import scale_loss
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW
from rapidformer.optim.observer import RunObserver, get_observer
from rapidformer.overlay import find_fact


class UpdatingRun(BackwardRun):
    """Forward and backward passes of whole updates."""

    _compiles_update = False

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

        ``forward(batch)`` returns the mean loss, or ``(loss, weight)``, or is an objective bound to
        its model (``rapidformer.objectives``). Every loop of the library trains this way, and it is
        the only way to train a model that is split into stages
        (``--pipeline-model-parallel-size``). ``after_micro_batch`` is called after each of them but
        the last; those of a pipeline or a CUDA graph are all under way at once, so there it is
        called after them all. ``steps_at_once`` says that nothing looks at the gradients before
        ``step``: a CUDA graph may then update the weights, too.
        """
        self._compile_update()
        if isinstance(forward, UpdatePreparation):
            update = forward.prepare(update, self.topology, self.device)
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
                started = self._started = StartedMicroBatch(micro_batch)
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


def _observe_wait(updates: Iterator[Update]) -> Iterator[Update]:
    """Report when the wait for data begins and ends."""
    while True:
        get_observer().see_phase("loop")
        update = next(updates, None)
        if update is None:
            return
        get_observer().see_phase("data")
        yield update
