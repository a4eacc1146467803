"""Reports whether steps are replayed as CUDA graphs, and if not, why."""

from __future__ import annotations

from rapidformer.accel.cuda_graph.graphs import GraphedPasses
from rapidformer.training.callbacks import Callback, Control, RunningLoop


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
