"""Record the passes of an update as a CUDA graph, and compare its replays with the passes.

Every gradient is compared, not a summary of them. If a replay differs by more than the order of
sums explains, the passes run once more, to see how far they differ by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rapidformer.accel.cuda_graph.capture import CudaCapture
from rapidformer.accel.cuda_graph.comparing import are_close, get_limit, measure_differences
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.passes import Outcome, Passes
from rapidformer.accel.cuda_graph.snapshot import Snapshot, draw_unused


@dataclass
class RecordedPasses:
    """Recorded passes, their results, and the call that computes these again."""

    passes: Passes
    outcome: Outcome
    replay: Callable[[], None]
    limit: float
    """How far a replay may differ from the passes, relative; 0.0: the same bits."""
    is_proven: bool = False
    """Whether it may be replayed without being compared."""


class Recorder:
    """Records passes, and checks that a replay gives the results of the passes themselves."""

    def __init__(self, capture: CudaCapture) -> None:
        self._capture = capture
        self._unused = 0
        """Random numbers that a micro-batch may draw on the host, without effect."""
        self.is_warm = False
        """Whether passes have run, so that others can be recorded."""

    def warm_up(self, passes: Passes, before: Snapshot, unused: int) -> Outcome:
        """Run the very first passes, which may still set things up, such as compiled blocks."""
        outcome = self._capture.warm_up(passes.run, forbids_reads=False)
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
        """Record passes and check replays on two batches; ``is_used``: a replay is this update."""
        # Compiling a block for another size waits for the device as well.
        expected = self._capture.warm_up(passes.rehearse, forbids_reads=not self._capture.compiles)
        drawn = self._count_drawn(passes, before)
        before.restore()
        passes.gradients = gradients
        with passes.without_effect():
            outcome, run_again = self._capture.record(passes.run)
        before.host_numbers.restore()

        def replay() -> None:
            run_again()
            draw_unused(drawn)

        limit = get_limit(is_16_bit=self._capture.is_16_bit)
        graph = RecordedPasses(passes, outcome, replay, limit)
        self._check_replay(graph, expected, before)
        del expected  # there would be three copies of the gradients below
        # The next batch of this size may be far away, and would then wait for a comparison.
        with passes.shifted():
            before.restore()
            self._compare(graph, before)
        # With the update in the graph, they are in memory that the next recording shares.
        passes.used = None
        if is_used:
            _replay(graph, before)
        return graph

    def compare(self, graph: RecordedPasses, before: Snapshot) -> Outcome:
        """Run the passes of a graph on the update that was copied in, and replay it for that."""
        self._compare(graph, before)
        graph.is_proven = True
        if graph.passes.updated:
            _replay(graph, before)
        return graph.outcome

    def _compare(self, graph: RecordedPasses, before: Snapshot) -> None:
        expected = self._capture.warm_up(graph.passes.run_passes, forbids_reads=False)
        before.restore()
        self._check_replay(graph, expected, before)

    def _count_drawn(self, passes: Passes, before: Snapshot) -> int:
        """How many numbers the passes have just drawn on the host; raises if they had an effect."""
        return before.host_numbers.count_unused(self._unused * passes.count)

    def _check_replay(self, graph: RecordedPasses, expected: Outcome, before: Snapshot) -> None:
        """Replay a graph without updating weights, and compare losses, parts, norm and gradients.

        What it is compared with is run once more if the two differ: they may do so by themselves.
        """
        with graph.passes.without_effect():
            graph.replay()
        problem = _find_problem(graph, expected)
        if problem is not None:
            before.restore()
            again = self._capture.warm_up(graph.passes.run_passes, forbids_reads=False)
            spread = max(measure_differences(again.gradients, expected.gradients), default=0.0)
            if spread:
                limit = get_limit(is_16_bit=self._capture.is_16_bit, spread=spread)
                graph.limit = max(graph.limit, limit)
                problem = _find_problem(graph, expected)
        if problem is not None:
            raise NotRepeatableError(problem)


def _replay(graph: RecordedPasses, before: Snapshot) -> None:
    """Replay a graph that was compared: this time, it may update the weights."""
    before.restore()
    graph.passes.prepare()
    graph.replay()


def _find_problem(graph: RecordedPasses, expected: Outcome) -> str | None:
    """How the results of a replay differ from those of its passes."""
    outcome, limit = graph.outcome, graph.limit
    for mine, theirs in zip(outcome.read(), expected.read(), strict=True):
        if not are_close(mine, theirs, limit, least=1e-7 * (limit > 0)):
            return f"replaying a step gave {mine:.6g} where running it gave {theirs:.6g}"
    replayed = outcome.gradients if outcome.gradients is not None else graph.passes.used
    if replayed is None:
        return None  # compared when it was recorded; the norm of all is compared every time
    placed = map(_shape_like, replayed, expected.gradients or ())
    differences = measure_differences(list(placed), expected.gradients)
    count = sum(not difference <= limit for difference in differences)
    if not count:
        return None
    return (
        f"replaying a step gave {count} of {len(differences)} gradients other values than "
        f"running it (by {max(differences):.1e}, relative)"
    )


def _shape_like(placed: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """A gradient that may have been placed in rows for several ranks, zeros at the end."""
    if placed is None or gradient is None or placed.shape == gradient.shape:
        return placed
    return placed.reshape(-1)[: gradient.numel()].view_as(gradient)
