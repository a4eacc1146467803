"""The end of an update as a graph of its own: it makes the mean of sums, clips and updates.

It follows what several ranks exchange, or passes that are replayed inside a user's step. It knows
neither batches nor the user's code, so it is recorded once for all sizes. If ranks hold shards of
the gradients, it is two graphs: what comes before and after the sum of all squares.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rapidformer.accel.cuda_graph.capture import CudaCapture, describe_error
from rapidformer.accel.cuda_graph.comparing import are_close
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.passes import GraphedUpdate
from rapidformer.accel.unpad.rows import NO_SIZES, Sizes
from rapidformer.compat.torch_tensors import copy_all, multiply_all
from rapidformer.dist.collectives import gather_objects, max_over_replicas
from rapidformer.dist.topology import Topology
from rapidformer.dist.whole import get_shard
from rapidformer.log import get_logger
from rapidformer.optim.gradients import sum_all_squares, sum_over_mesh
from rapidformer.optim.multi_tensor.launch import Launch

_ROUNDING = 1e-5
"""What a sum in another order may change in a norm, relative."""

_MOST_UNUSED = 3
"""If other parameters have gradients in every update, recording takes longer than it saves."""

Gradients = Sequence[Tensor | None]


class Finishing:
    """Measures and clips the gradients of an update, and updates the weights."""

    def __init__(self, capture: CudaCapture, parameters: Sequence[nn.Parameter]) -> None:
        """``parameters`` are those that are updated, and gradients are in their order."""
        self._capture, self.parameters = capture, parameters
        self._factor = torch.ones((), device=capture.device)
        self._gradients: Gradients = []
        self._places: Gradients = []
        self._mesh: DeviceMesh | None = None
        """Over which the gradients are split, if they are."""
        self._graphed: GraphedUpdate
        self._launch: Launch | None = None
        self._recorded: tuple[list[Callable[[], object]], Tensor] | None = None
        """What to call one after the other, and the norm that it leaves."""
        self._unused = 0
        """Recordings in a row that were not replayed for a later update."""

    @property
    def updates(self) -> bool:
        """Whether a graph updates the weights."""
        return self._recorded is not None

    def forget(self) -> None:
        """Drop the graph and what it needs."""
        self._gradients, self._places, self._launch, self._recorded = [], [], None, None

    def place(self, gradients: Gradients) -> Gradients:
        """Copies of gradients at fixed places."""
        if not _are_alike(gradients, self._places):
            self.forget()
            self._places = [None if g is None else torch.empty_like(g) for g in gradients]
        copy_all(
            [p for p in self._places if p is not None], [g for g in gradients if g is not None]
        )
        return self._places

    def prepare(self, gradients: Gradients, graphed: GraphedUpdate) -> bool:
        """Whether ``run`` will update the weights, with these sums or means."""
        if self._recorded is not None and self._fits(gradients):
            self._unused = 0
            return True
        has_run = _are_alike(gradients, self._gradients)  # kernels are set up
        self._gradients, self._graphed, self._recorded = gradients, graphed, None
        meshes = {getattr(gradient, "device_mesh", None) for gradient in self._held}
        self._mesh, *others = meshes or (None,)
        launch = None if others else graphed.find_launch(self.parameters, gradients)
        self._launch = launch
        if launch is None:
            self.forget()
        elif has_run and self._unused < _MOST_UNUSED:
            self._unused += 1
            try:
                self._recorded = self._record()
            except Exception as error:  # it runs without a graph, like the first one
                self._unused = _MOST_UNUSED
                reason = describe_error(error)
                get_logger().info(f"the optimizer's step is not replayed as a CUDA graph: {reason}")
        return launch is not None

    def run(self, total: float | Tensor) -> Tensor:
        """Divide sums by the weight of all ranks, and update the weights; returns the norm."""
        self._factor.fill_(1.0 / total)
        if self._recorded is None:
            return self._capture.warm_up(self._run_eagerly, forbids_reads=False)
        calls, norm = self._recorded
        for call in calls:
            call()
        return norm.clone()  # the next replay overwrites it

    @property
    def _held(self) -> list[Tensor]:
        return [gradient for gradient in self._gradients if gradient is not None]

    def _fits(self, gradients: Gradients) -> bool:
        """Whether the graph may be replayed: all it needs is where it was."""
        assert self._launch is not None
        are_same = all(map(operator.is_, gradients, self._gradients))
        return are_same and self._launch.prepare()

    def _measure(self) -> list[Tensor]:
        """This rank's part of the sum of all squares."""
        if self._gradients is not self._places:  # which are means
            multiply_all(list(map(get_shard, self._held)), self._factor)
        return list(sum_all_squares(self._held).values())

    def _update(self, squares: Tensor) -> list[Tensor]:
        """Clip, and update the weights; returns the norm."""
        assert self._launch is not None
        norm = squares.sqrt().float()
        pairs = zip(self.parameters, self._gradients, strict=True)
        by_parameter = {id(p): gradient for p, gradient in pairs if gradient is not None}
        self._graphed.run(self._launch, by_parameter, norm)
        return [norm]

    def _run_eagerly(self) -> Tensor:
        [squares] = self._measure()
        [norm] = self._update(sum_over_mesh(squares, self._mesh))
        return norm

    def _record(self) -> tuple[list[Callable[[], object]], Tensor]:
        """Record, and compare the norm of a replay that changes nothing; by this rank alone."""
        self._factor.fill_(1.0)
        record = self._capture.record
        with self._graphed.without_effect():
            if self._mesh is None:
                norms, replay = record(lambda: self._update(self._measure()[0]))
                calls: list[Callable[[], object]] = [replay]
            else:
                squares, measure = record(self._measure)
                measure()
                norms, update = record(lambda: self._update(squares[0]))
                calls = [measure, lambda: sum_over_mesh(squares[0], self._mesh), update]
            calls[-1]()
        [expected] = sum_all_squares(self._held).values()
        mine, theirs = float(norms[0]), math.sqrt(float(expected))
        if not are_close(mine, theirs, _ROUNDING):
            text = f"replaying an update gave the norm {mine:.6g} instead of {theirs:.6g}"
            raise NotRepeatableError(text)
        return calls, norms[0]


def _are_alike(gradients: Gradients, others: Gradients) -> bool:
    """Whether the same parameters have gradients."""
    return [g is None for g in gradients] == [g is None for g in others]


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
