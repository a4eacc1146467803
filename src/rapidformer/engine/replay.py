"""Run the passes of an update, or finish its gradients, as CUDA graphs where that is possible."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.capture import CudaCapture
from rapidformer.accel.cuda_graph.graphs import GraphedPasses
from rapidformer.accel.cuda_graph.passes import GraphedUpdate
from rapidformer.accel.cuda_graph.permission import MayCapture
from rapidformer.accel.data_parallel import GradientReducer
from rapidformer.accel.parallelize import Parallelized
from rapidformer.accel.sharding.zero import ShardedGradients
from rapidformer.accel.unpad.promises import reading_no_padding
from rapidformer.config.effect import MOST_COPIED
from rapidformer.data.update import MicroBatchResult, Update
from rapidformer.dist.heartbeat import beat
from rapidformer.engine.backward import BackwardPasses
from rapidformer.engine.optimizing import uses_plain_gradients
from rapidformer.engine.runtime import Runtime
from rapidformer.engine.weights import LossWeights
from rapidformer.errors import is_out_of_gpu_memory
from rapidformer.models.work import ModelWork
from rapidformer.optim.gradients import take_gradients
from rapidformer.optim.observer import get_observer
from rapidformer.overlay import find_fact

_MOST_REFUSED = 3
"""How often an update may turn out not to be recordable before none is tried any more."""


@dataclass(eq=False)
class Replay:
    """Lets the graphs of a model do its updates."""

    passes: BackwardPasses
    update: GraphedUpdate | None
    """What updates weights inside a graph, if the optimizer can."""
    device: torch.device
    _refused: int = 0

    def run(
        self, graphs: GraphedPasses, forward: Any, update: Update, *, steps_at_once: bool
    ) -> list[MicroBatchResult] | None:
        """Replay the passes; None if they must run one by one."""
        passes, clock, weights = self.passes, self.passes.clock, self.passes.weights
        beat("forward", clock.updates + 1)
        graphed_update = self._find_update(steps_at_once)
        is_padding_left = getattr(forward, "reads_no_padding", False)
        with reading_no_padding() if is_padding_left else nullcontext():
            outcome = graphs.run(
                functools.partial(weights.run_forward, forward), update,
                getattr(forward, "steps", (forward,)), graphed_update,
            )  # fmt: skip
        if outcome is None:
            return None
        get_observer().see_phase("forward")
        for micro_batch, result in zip(update, outcome.results, strict=True):
            with clock.accumulate(is_last=micro_batch is update[-1]):
                _, fraction = passes.count(result, micro_batch)
            clock.add_loss(result.loss, fraction)
        get_observer().see_phase("backward")
        beat("update")
        # In the order of passes that run one by one: other ranks may do so in this update.
        sums = graphs.sum_gradients(outcome)
        if sums is not None:
            self._finish_sums(graphs, sums, graphed_update)
            return outcome.results
        clock.sum_weights(self.device)
        assert outcome.norm is not None
        if outcome.gradients is not None:
            _assign(passes.parameters, outcome.gradients)
        clock.take_finished(
            passes.parameters, outcome.norm,
            is_applied=outcome.gradients is None, may_change=not steps_at_once,
        )  # fmt: skip
        passes.notice_unfrozen()
        return outcome.results

    def _find_update(self, steps_at_once: bool) -> GraphedUpdate | None:
        """What updates weights inside a graph; None if something looks at the gradients before."""
        of = self.passes
        is_plain = steps_at_once and uses_plain_gradients(of.clock, of.optimizer, of.scaler)
        return self.update if is_plain else None

    def _finish_sums(
        self, graphs: GraphedPasses, sums: list[Tensor | None], graphed: GraphedUpdate | None
    ) -> None:
        """Make a mean of sums over ranks, and update the weights if that may be in a graph."""
        passes, finishing = self.passes, graphs.finishing
        if graphed is None or not finishing.prepare(sums, graphed):
            _assign(finishing.parameters, sums)
            passes.finish()
            return
        norm = finishing.run(passes.clock.sum_weights(self.device))
        passes.clock.take_finished(passes.parameters, norm, is_applied=True, may_change=False)
        passes.notice_unfrozen()

    def finish(self, graphs: GraphedPasses, *, steps_at_once: bool) -> None:
        """Update the weights with finished gradients, after passes inside the user's own code."""
        passes, pieces, finishing = self.passes, graphs.in_pieces, graphs.finishing
        graphed = self._find_update(steps_at_once)
        may_try = self._refused < _MOST_REFUSED and passes.clock.is_unused
        if graphed is None or not may_try or pieces is None or pieces.problem is not None:
            return
        gradients = take_gradients(passes.parameters)
        size = sum(gradient.nbytes for gradient in gradients if gradient is not None)
        try:
            is_ready = size <= MOST_COPIED
            is_ready = is_ready and finishing.prepare(finishing.place(gradients), graphed)
        except RuntimeError as error:
            if not is_out_of_gpu_memory(error):
                raise
            finishing.forget()
            self._refused, is_ready = _MOST_REFUSED, False
        if not is_ready:
            self._refused += 1
            _assign(passes.parameters, gradients)
            return
        norm = finishing.run(1.0)
        pieces.end()  # graphs share their memory
        passes.clock.take_finished(passes.parameters, norm, is_applied=True, may_change=False)


def build_graphs(
    parallelized: Parallelized,
    parameters: Sequence[nn.Parameter],
    weights: LossWeights,
    runtime: Runtime,
    work: ModelWork | None,
) -> GraphedPasses | None:
    """Graphs of the passes of an update; None if nothing may be captured."""
    model, synchronizer = parallelized.model, parallelized.synchronizer
    allowed = find_fact(model, MayCapture)
    if allowed is None:
        return None
    placed = synchronizer.place_weights() if isinstance(synchronizer, ShardedGradients) else None
    capture = CudaCapture(
        runtime.device, is_16_bit=runtime.precision.dtype is not None,
        compiles=parallelized.wants("compilation"),
    )  # fmt: skip
    graphs = GraphedPasses(
        model, placed.parameters if placed else parameters, capture, weights.count_labels,
        is_asked=allowed.is_asked, work=work, topology=runtime.topology,
        exchange=synchronizer if isinstance(synchronizer, GradientReducer) else placed,
        blocks=parallelized.plan.get_blocks(model) if allowed.in_pieces else (),
    )  # fmt: skip
    row = parallelized.applied.get_row("CUDA graph")
    row.find_obstacle = functools.partial(_find_obstacle, weakref.ref(graphs))
    return graphs


def _find_obstacle(reference: weakref.ref[GraphedPasses]) -> str | None:
    graphs = reference()
    return None if graphs is None else graphs.obstacle


def _assign(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
