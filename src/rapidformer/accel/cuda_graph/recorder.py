"""Record the passes of an update as a CUDA graph, and compare its replays with the passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rapidformer.accel.cuda_graph.capture import Capture
from rapidformer.accel.cuda_graph.host_numbers import HostNumbers, draw_unused
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.passes import Outcome, Passes
from rapidformer.compat.torch_tensors import count_changes

_CHECKED_BATCHES = 2
"""On how many batches the first graph is compared with the passes themselves."""
_LIMIT = 1e-5
"""How far losses and norms of a replay may differ from those of the passes, relative."""
_LIMIT_16_BIT = 1e-3


@dataclass
class RecordedPasses:
    """Recorded passes, their results, and the call that computes these again."""

    passes: Passes
    outcome: Outcome
    replay: Callable[[], None]


class Recorder:
    """Records passes, and checks that a replay gives the results of the passes themselves."""

    def __init__(self, capture: Capture, *, is_16_bit: bool, compiles: bool) -> None:
        self._capture = capture
        self._limit = _LIMIT_16_BIT if is_16_bit else _LIMIT
        self._compiles = compiles
        self._checked = 0
        self._unused = 0
        """Random numbers that a micro-batch may draw on the host, without effect."""
        self.is_warm = False
        """Whether passes have run, so that others can be recorded."""

    @property
    def is_proven(self) -> bool:
        """Whether enough replays have given the right results."""
        return self._checked >= _CHECKED_BATCHES

    @property
    def has_room(self) -> bool:
        """Whether there is plenty of memory for more recordings."""
        return self._capture.has_room

    def warm_up(self, passes: Passes, before: Snapshot, unused: int) -> Outcome:
        """Run the very first passes, which may still set things up, such as compiled blocks.

        ``unused`` is how many random numbers a forward pass may draw on the host.
        """
        outcome = self._capture.warm_up(passes.run_passes, forbids_reads=False)
        self._unused = unused
        self._count_drawn(passes, before)
        self.is_warm = True
        return outcome

    def record(
        self,
        passes: Passes,
        gradients: list[Tensor | None] | None,
        before: Snapshot,
        *,
        is_used: bool = True,
    ) -> RecordedPasses:
        """Record passes, and check a replay of them.

        If ``gradients`` are given, the passes leave theirs in the same memory. With ``is_used``,
        the replay is this update; otherwise it does not update the weights.
        """
        # Compiling a block for another size waits for the device as well.
        expected = self._capture.warm_up(passes.rehearse, forbids_reads=not self._compiles).read()
        drawn = self._count_drawn(passes, before)
        before.restore()
        passes.gradients = gradients
        with passes.without_effect():
            outcome, run_again = self._capture.record(passes.run)
        before.host_numbers.restore()

        def replay() -> None:
            run_again()
            draw_unused(drawn)

        graph = RecordedPasses(passes, outcome, replay)
        self._replay(graph, expected, before, is_used=is_used)
        return graph

    def compare(self, graph: RecordedPasses, before: Snapshot) -> None:
        """Run the passes of a graph, and replay it for this update."""
        expected = self._capture.warm_up(graph.passes.run_passes, forbids_reads=False).read()
        before.restore()
        self._replay(graph, expected, before)

    def _count_drawn(self, passes: Passes, before: Snapshot) -> int:
        """How many numbers the passes have just drawn on the host; raises if they had an effect."""
        return before.host_numbers.count_unused(self._unused * passes.count)

    def _replay(
        self,
        graph: RecordedPasses,
        expected: list[float],
        before: Snapshot,
        *,
        is_used: bool = True,
    ) -> None:
        with graph.passes.without_effect():
            graph.replay()
            self._check_results(graph.outcome, expected)
        self._checked += 1
        if graph.passes.updated and is_used:
            before.restore()
            graph.passes.prepare()
            graph.replay()  # this time, it updates the weights

    def _check_results(self, outcome: Outcome, expected: list[float]) -> None:
        for mine, theirs in zip(outcome.read(), expected, strict=True):
            is_same = math.isclose(mine, theirs, rel_tol=self._limit, abs_tol=1e-7)
            if not is_same and not (math.isnan(mine) and math.isnan(theirs)):
                raise NotRepeatableError(
                    f"replaying a step gave {mine:.6g} where running it gave {theirs:.6g}"
                )


class Snapshot:
    """What passes may change, apart from gradients: random numbers, buffers and similar."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._drawn = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
        self.host_numbers = HostNumbers(has_device=is_cuda)
        self._tensors = [(t, t.detach().clone(), count_changes(t)) for t in tensors]

    def restore(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._drawn, self._device)
        else:
            torch.set_rng_state(self._drawn)
        self.host_numbers.restore()
        for tensor, value, changes in self._tensors:
            # torch's batch_norm changes its statistics without counting it.
            if count_changes(tensor) != changes or not torch.equal(tensor, value):
                with torch.no_grad():
                    tensor.copy_(value)
