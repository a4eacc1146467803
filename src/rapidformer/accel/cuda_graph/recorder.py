"""Record the passes of an update as a CUDA graph, and compare its replays with the passes.

Every gradient is compared, not a summary of them. If kernels are deterministic, a replay must have
the same bits; otherwise sums may be in another order. If a replay differs by more, the passes run
once more, to see how far they differ by themselves.
"""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from rapidformer.accel.cuda_graph.host_constants import HostConstants
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.passes import Outcome, Passes, Snapshot, draw_unused
from rapidformer.compat.torch_tensors import stop_allocating
from rapidformer.errors import RapidformerError

_ROUNDING, _ROUNDING_16_BIT = 2.0**-17, 2.0**-9
"""What a sum in another order may change, relative, unless kernels are deterministic."""
MARGIN = 4
"""How many times the difference of two runs that of a replay may be."""
_LEAST = 0.01
"""A gradient is compared relative to its largest number, or to this part of the largest of all: one
that is zero in theory, such as that of the key bias, is nothing but noise."""


def choose_rounding(*, is_16_bit: bool) -> float:
    """What a sum in another order may change, relative."""
    return _ROUNDING_16_BIT if is_16_bit else _ROUNDING


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

    def __init__(self, capture: CudaCapture, *, is_16_bit: bool, compiles: bool) -> None:
        self._capture = capture
        self._rounding = choose_rounding(is_16_bit=is_16_bit)
        self._compiles = compiles
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
        expected = self._capture.warm_up(passes.rehearse, forbids_reads=not self._compiles)
        drawn = self._count_drawn(passes, before)
        before.restore()
        passes.gradients = gradients
        with passes.without_effect():
            outcome, run_again = self._capture.record(passes.run)
        before.host_numbers.restore()

        def replay() -> None:
            run_again()
            draw_unused(drawn)

        is_exact = torch.are_deterministic_algorithms_enabled()
        limit = 0.0 if is_exact else MARGIN * self._rounding
        graph = RecordedPasses(passes, outcome, replay, limit)
        self._check_replay(graph, expected, before)
        del expected  # there would be three copies of the gradients below
        # The next batch of this size may be far away, and would then wait for a comparison.
        with passes.shifted():
            before.restore()
            expected = self._capture.warm_up(passes.run_passes, forbids_reads=False)
            before.restore()
            self._check_replay(graph, expected, before)
        # With the update in the graph, they are in memory that the next recording shares.
        passes.used = None
        if is_used:
            before.restore()
            passes.prepare()
            graph.replay()  # this time, it may update the weights
        return graph

    def compare(self, graph: RecordedPasses, before: Snapshot) -> Outcome:
        """Run the passes of a graph on the update that was copied in, and replay it for that."""
        expected = self._capture.warm_up(graph.passes.run_passes, forbids_reads=False)
        before.restore()
        self._check_replay(graph, expected, before)
        graph.is_proven = True
        if graph.passes.updated:
            before.restore()
            graph.passes.prepare()
            graph.replay()
        return graph.outcome

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
                graph.limit = max(graph.limit, MARGIN * max(spread, self._rounding))
                problem = _find_problem(graph, expected)
        if problem is not None:
            raise NotRepeatableError(problem)


def _find_problem(graph: RecordedPasses, expected: Outcome) -> str | None:
    """How the results of a replay differ from those of its passes."""
    outcome, limit = graph.outcome, graph.limit
    for mine, theirs in zip(outcome.read(), expected.read(), strict=True):
        is_same = math.isclose(mine, theirs, rel_tol=limit, abs_tol=1e-7 * (limit > 0))
        if not is_same and not (math.isnan(mine) and math.isnan(theirs)):
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


def measure_differences(
    mine: Sequence[Tensor | None] | None, theirs: Sequence[Tensor | None] | None
) -> list[float]:
    """How far each gradient differs, relative; 0.0 if all bits agree. Waits for the device."""
    pairs = list(zip(mine or (), theirs or (), strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return [math.inf]
    held = [(a.detach(), b.detach()) for a, b in pairs if a is not None and b is not None]
    if not held:
        return []
    largest = torch.stack([b.abs().amax().double() for _, b in held]).nan_to_num()
    scales = torch.maximum(largest, _LEAST * largest.max()).clamp(min=1e-30)
    distances = torch.stack([_get_distance(a, b).double() for a, b in held])
    differences: list[float] = (distances / scales).nan_to_num(nan=math.inf).tolist()
    return differences


def _get_distance(mine: Tensor, theirs: Tensor) -> Tensor:
    is_same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    return torch.where(is_same, 0.0, mine - theirs).abs().amax()


def describe_error(error: Exception) -> str:
    """Why something could not be recorded, on one line."""
    if isinstance(error, RapidformerError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    # Below a TorchScript function, torch puts the reason after a traceback.
    text = next((line for line in lines if line.startswith("RuntimeError: ")), lines[0])
    if "synchronizing CUDA operation" in text:
        return f"a step waits for the GPU, as .item() does{_find_place(error)}"
    if "legacy stream" in text:
        return "a loss or an output of an earlier step is kept with its graph: keep loss.detach()"
    return f"{type(error).__name__}: {text.removeprefix('RuntimeError: ')}"


def _find_place(error: Exception) -> str:
    """The innermost line that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = tuple(
        str(Path(file).parents[depth]) for file, depth in ((torch.__file__, 0), (__file__, 2))
    )
    lines = (
        f" ({Path(f.filename).name}:{f.lineno})"
        for f in reversed(frames)
        if not f.filename.startswith(own)
    )
    return next(lines, "")


T = TypeVar("T")
_MOST_RESERVED, _MOST_USED = 0.5, 0.75
"""If this run has reserved more of the device's memory than this, or all that share the device
use more, a recording might run out of it."""


class CudaCapture:
    """Records with torch's CUDA graphs, which share a pool of memory unless a recording fails.

    A pool ends with its last graph, and torch refuses to record into it again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._constants = HostConstants(device)
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        """Those that use the pool."""
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Kept: torch still asks them which pinned memory is theirs."""

    def split(self) -> CudaCapture:
        """Another one, whose recordings may be replayed in between those of this one."""
        return CudaCapture(self._device)

    @property
    def has_room(self) -> bool:
        """Whether there is plenty of memory for further recordings."""
        free, total = torch.cuda.mem_get_info(self._device)  # other processes may use it as well
        allowed = torch.cuda.get_per_process_memory_fraction(self._stream.device) * total
        reserved = torch.cuda.memory_reserved(self._device)
        return reserved <= _MOST_RESERVED * allowed and total - free <= _MOST_USED * total

    def warm_up(self, function: Callable[[], T], *, forbids_reads: bool) -> T:
        """Run the function as it will be recorded; with ``forbids_reads``, it may not wait."""
        # On the stream that records later: libraries allocate workspaces per stream.
        current = torch.cuda.current_stream(self._device)
        # Each stream waits for the other, so memory may be used on both without record_stream().
        self._stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            if forbids_reads:
                torch.cuda.set_sync_debug_mode("error")
            with torch.cuda.stream(self._stream), self._constants:
                return function()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(self._stream)

    def record(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record without executing. Returns the result and the replay, which fills it."""
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with self._recording(graph), self._constants:
                result = function()
        except BaseException:
            self._failed.append(graph)
            self._recover()
            graph.reset()  # or its memory would be lost to the passes that run instead
            raise
        self._graphs.add(graph)
        return result, graph.replay

    def close(self) -> None:
        """Give the memory of recordings back to the device: those that nobody holds any more."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """As ``torch.cuda.graph``, but cached memory is released only if it may be needed."""
        if not self.has_room:
            self.close()
        with torch.cuda.stream(self._stream):
            # Only calls of this thread can spoil it: loader threads may allocate pinned memory.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # it only repeats that something has failed
                    graph.capture_end()
                raise
            graph.capture_end()

    def _recover(self) -> None:
        """Leave torch as it was before a failed recording."""
        stop_allocating(self._device, self._pool)
        self._pool = torch.cuda.graph_pool_handle()  # torch may refuse the other one from now on
        self._graphs.clear()
        # After a failed capture, random numbers need a successful one.
        with suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        with suppress(RuntimeError):
            value = torch.zeros((), device=self._device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
                value.add_(1)
