"""What several ranks exchange around the passes of an update, and the graph of its end.

That second graph makes the mean of the sums, clips it and updates the weights. It knows neither
batches nor the user's code, so it is recorded once for all sizes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.passes import GraphedUpdate, Outcome, place_sums
from rapidformer.accel.cuda_graph.recorder import CudaCapture, describe_error
from rapidformer.accel.data_parallel import GradientReducer
from rapidformer.accel.unpad.rows import NO_SIZES, Sizes
from rapidformer.compat.torch_tensors import multiply_all
from rapidformer.dist.collectives import gather_objects, max_over_replicas
from rapidformer.dist.topology import Topology
from rapidformer.log import get_logger
from rapidformer.optim.gradients import get_norm
from rapidformer.optim.multi_tensor.launch import Launch

_ROUNDING = 1e-5
"""What a sum in another order may change in a norm, relative."""

Recorded = tuple[Outcome, Callable[[], None]]


class Finishing:
    """Sums gradients over the ranks, measures and clips their mean, and updates the weights."""

    def __init__(
        self,
        capture: CudaCapture,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        reducer: GradientReducer,
    ) -> None:
        self._capture, self._parameters, self._reducer = capture, parameters, reducer
        self._factor = torch.ones((), device=device)
        self._gradients: list[Tensor | None] = []
        self._launch: Launch | None = None
        self._recorded: Recorded | None = None
        self._is_warm = self._has_failed = False

    @property
    def updates(self) -> bool:
        """Whether the graph updates the weights."""
        return self._recorded is not None

    def sum_gradients(self, outcome: Outcome) -> Outcome:
        """The outcome with the sums over all ranks, which all of them call this for."""
        assert outcome.gradients is not None
        if not self._reducer.has_placed(outcome.gradients):  # the passes were not replayed
            outcome = place_sums(outcome, self._parameters, self._reducer)
        pairs = zip(self._parameters, outcome.gradients or (), strict=True)
        sums = self._reducer.sum_placed({p: g for p, g in pairs if g is not None})
        return replace(outcome, gradients=[sums.get(p) for p in self._parameters])

    def run(
        self, outcome: Outcome, total: float | Tensor, graphed: GraphedUpdate | None
    ) -> Outcome:
        """Divide sums by the weight of all ranks; with ``graphed``, update the weights as well."""
        assert outcome.gradients is not None
        if self._recorded is None or graphed is None or not self._fits(outcome.gradients):
            self._prepare(outcome.gradients, graphed)
        self._factor.fill_(1.0 / total)
        if self._recorded is None:
            compute = functools.partial(self._compute, graphed)
            finished = self._capture.warm_up(compute, forbids_reads=False)
        else:
            finished, replay = self._recorded
            replay()
        return replace(finished.copy([]), results=outcome.results)

    def forget(self) -> None:
        """Drop the graph and what it needs."""
        self._gradients, self._launch, self._recorded = [], None, None

    def _fits(self, gradients: list[Tensor | None]) -> bool:
        """Whether the graph may be replayed: all it needs is where it was."""
        assert self._launch is not None
        are_same = all(map(operator.is_, gradients, self._gradients))
        return are_same and self._launch.prepare()

    def _prepare(self, gradients: list[Tensor | None], graphed: GraphedUpdate | None) -> None:
        self.forget()
        self._gradients = gradients
        if graphed is not None:
            self._launch = graphed.find_launch(self._parameters, gradients)
        if graphed is None or self._launch is None:
            return
        if self._is_warm and not self._has_failed:
            try:
                self._recorded = self._record(graphed)
            except Exception as error:  # it runs without a graph, like the first one
                self._has_failed = True
                reason = describe_error(error)
                get_logger().info(f"the optimizer's step is not replayed as a CUDA graph: {reason}")
        self._is_warm = True

    def _compute(self, graphed: GraphedUpdate | None) -> Outcome:
        held = [gradient for gradient in self._gradients if gradient is not None]
        multiply_all(held, self._factor)
        norm = get_norm(held)
        if graphed is None or self._launch is None:
            return Outcome([], self._gradients, norm)
        pairs = zip(self._parameters, self._gradients, strict=True)
        by_parameter = {id(p): gradient for p, gradient in pairs if gradient is not None}
        graphed.run(self._launch, by_parameter, norm)
        return Outcome([], None, norm)

    def _record(self, graphed: GraphedUpdate) -> Recorded:
        """Record, and compare the norm of a replay that changes nothing."""
        self._factor.fill_(1.0)
        with graphed.without_effect():
            outcome, replay = self._capture.record(functools.partial(self._compute, graphed))
            replay()
        (mine,) = outcome.read()
        expected = float(get_norm([g for g in self._gradients if g is not None]))
        is_same = math.isclose(mine, expected, rel_tol=_ROUNDING)
        if not is_same and not (math.isnan(mine) and math.isnan(expected)):
            text = f"replaying an update gave the norm {mine:.6g} instead of {expected:.6g}"
            raise NotRepeatableError(text)
        return outcome, replay


def agree(
    topology: Topology, problem: str | None, sizes: Iterable[Sizes]
) -> tuple[str | None, Sizes]:
    """The first problem of any rank, and the largest sizes of the update, by the hosts alone.

    Ranks replay graphs of their own, so they may differ; but one that records while the others
    replay delays them all. With the same sizes, all of them record at the same time.
    """
    mine = map(max, zip(*sizes, NO_SIZES, strict=True))
    has_problem, *largest = max_over_replicas([int(problem is not None), *mine], topology)
    if has_problem and topology.num_replicas > 1:
        problems = enumerate(gather_objects(problem, topology))
        problem = next(f"rank {rank}: {text}" for rank, text in problems if text is not None)
    return problem, Sizes(*largest)
