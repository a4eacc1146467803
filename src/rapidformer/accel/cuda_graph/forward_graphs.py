"""Replay a model's blocks in evaluation and prediction, where nothing learns.

Rows are short and sorted by length, so that launching kernels takes longer than running them. The
number of tokens is rounded up, and a few graphs serve all batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.cuda_graph.block_calls import BlockCall, without_cast_cache
from rapidformer.accel.cuda_graph.block_graphs import BlockGraphs
from rapidformer.accel.cuda_graph.chains import Chain
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.passes import Snapshot
from rapidformer.accel.cuda_graph.recorder import MARGIN, CudaCapture, measure_differences
from rapidformer.accel.unpad.filling import prove_filling
from rapidformer.compat.torch_dispatch import tree_leaves, tree_map_only
from rapidformer.log import say_once


def apply(assembly: Assembly) -> str | None:
    """Let blocks be replayed whenever they run without gradients in evaluation mode."""
    model, plan, device = assembly.model, assembly.plan, assembly.device
    blocks = plan.get_blocks(model)
    # A frozen second model runs inside steps that are recorded themselves.
    is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if assembly.is_training or is_frozen or not blocks:
        return None
    prove_filling(model, plan, assembly.precision.dtype)
    is_16_bit = assembly.precision.dtype is not None
    graphs = ForwardGraphs(
        model, blocks, device, CudaCapture(device), is_16_bit=is_16_bit, compiles=False
    )
    if graphs.problem is not None:
        return None
    assembly.applied.on_close(graphs.close)
    return "blocks are replayed as CUDA graphs"


class ForwardGraphs(BlockGraphs):
    """The graphs of all blocks of a model, in evaluation. A pass begins with the first block."""

    most_chained = math.inf

    def is_replayed(self, block: nn.Module) -> bool:
        """Whether a block that is called now may be replayed."""
        if torch.is_grad_enabled() or block.training:
            return False
        if block is self.blocks[0] or self.calls[block]:
            self.begin()
        return self.problem is None

    def record_all(self, chains: Sequence[Chain], before: Snapshot) -> Sequence[_Forward]:
        """Record chains that follow each other."""
        with without_cast_cache():
            return [_Forward(chain, self.capture, before, MARGIN * self.rounding)
                    for chain in chains]  # fmt: skip

    def give_up(self, problem: str) -> None:
        """Run blocks as they are from now on."""
        if self.problem is None:
            say_once(f"blocks are not replayed as CUDA graphs: {problem}")
        super().give_up(problem)

    def close(self) -> None:
        """Let blocks run as they did before."""
        self.problem = self.problem or "the engine is closed"
        super().close()
        self.capture.close()


class _Forward:
    """The forward pass of a chain of blocks as a graph."""

    def __init__(self, chain: Chain, capture: CudaCapture, before: Snapshot, limit: float) -> None:
        self._static = chain.static
        run = functools.partial(chain.run, *self._static.args, **self._static.kwargs)
        expected = capture.warm_up(run, forbids_reads=True)
        before.host_numbers.count_unused(0)
        self._output, self._replay = capture.record(run)
        self._replay()
        mine, theirs = ([x for x in tree_leaves(o) if isinstance(x, Tensor)] for o in
                        (self._output, expected))  # fmt: skip
        difference = max(measure_differences(mine, theirs), default=0.0)
        if not difference <= limit:
            raise NotRepeatableError(
                f"replaying blocks gave other outputs than running them (by {difference:.1e}, "
                "relative)"
            )

    def replay(self, call: BlockCall, numbers: Tensor, is_current: Callable[[], bool]) -> Any:
        """The output of this call."""
        self._static.fill(call)
        self._replay()
        return tree_map_only(Tensor, torch.clone, self._output)
