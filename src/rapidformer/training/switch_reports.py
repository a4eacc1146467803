"""Reports what ``--compile`` has compiled, and whether steps are replayed as CUDA graphs."""

from __future__ import annotations

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.cuda_graph.graphs import GraphedPasses
from rapidformer.training.callbacks import Callback, Control, RunningLoop


class CompileReport(Callback):
    """Says ``compiled  2 graphs in 11.3 s, 0 recompilations``, again if more were needed later.

    After a first step that compiled nothing, it says so.
    """

    def __init__(self, blocks: CompiledBlocks) -> None:
        self._blocks = blocks
        self._graphs_before = 0
        self._graphs_reported: int | None = None

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        graphs = self._blocks.graphs
        if graphs == self._graphs_before and graphs != self._graphs_reported:
            loop.say(f"compiled  {self._blocks.describe()}")
            self._graphs_reported = graphs
        self._graphs_before = graphs


class GraphReport(Callback):
    """Says ``graphs    steps are replayed as CUDA graphs from step 4 on``, or why they are not.

    The number of graphs is in every line of ``metrics.jsonl``, and in the log at the end.
    """

    def __init__(self, graphs: GraphedPasses) -> None:
        self._graphs = graphs
        self._is_reported = self._is_dropped = False

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        graphs = self._graphs
        if graphs.problem is not None and not self._is_dropped:
            loop.say(f"graphs    steps are not replayed as CUDA graphs: {graphs.problem}")
            self._is_dropped = True
        elif graphs.count and not self._is_reported:
            what = "steps, optimizer included," if graphs.updates else "steps"
            loop.say(f"graphs    {what} are replayed as CUDA graphs from step {loop.step + 1} on")
            self._is_reported = True

    def on_train_end(self, loop: RunningLoop, control: Control) -> None:
        count = self._graphs.count
        if count:
            loop.say(f"graphs    {count} CUDA graph{'s' if count > 1 else ''} captured")
