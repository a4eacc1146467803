"""Reports what ``--compile`` has compiled, once a step runs without compiling anything."""

from __future__ import annotations

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
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
