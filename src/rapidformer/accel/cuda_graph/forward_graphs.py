"""Replay a model, or else its blocks, in evaluation and prediction, where nothing learns.

Rows are short and sorted by length, so that launching kernels takes longer than running them. The
number of tokens is rounded up, and a few graphs serve all batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.cuda_graph.block_graphs import BlockGraphs
from rapidformer.accel.cuda_graph.capture import CudaCapture
from rapidformer.accel.cuda_graph.filling import prove_filling
from rapidformer.accel.cuda_graph.inputs import Inputs, read_inputs
from rapidformer.accel.cuda_graph.model_graphs import ModelGraphs
from rapidformer.accel.cuda_graph.pieces import Pieces
from rapidformer.accel.cuda_graph.recorded_block import Recordable, RecordedForward
from rapidformer.accel.cuda_graph.snapshot import Snapshot
from rapidformer.accel.unpad.unpadding import is_library_code
from rapidformer.log import get_logger, say_once


def apply(assembly: Assembly) -> str | None:
    """Let blocks be replayed whenever they run without gradients in evaluation mode."""
    model, plan, device = assembly.model, assembly.plan, assembly.device
    blocks = plan.get_blocks(model)
    # A frozen second model runs inside steps that are recorded themselves.
    is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if is_frozen or not blocks:
        return None
    prove_filling(model, plan, assembly.precision.dtype)
    capture = CudaCapture(device, is_16_bit=assembly.precision.dtype is not None)
    graphs = ForwardModel(model, blocks, capture)
    assembly.applied.on_close(graphs.close)
    if graphs.of_blocks is not None and graphs.of_blocks.problem is not None:
        return None
    return "the model or its blocks are replayed as CUDA graphs"


class _Evaluated(Pieces):
    """Nothing learns, and calls that do are not replayed."""

    learns = False

    def is_replayed(self, called: nn.Module) -> bool:
        """Whether the model, or a block of it, may be replayed if it is called now."""
        if self.problem is not None or torch.is_grad_enabled() or called.training:
            return False
        if self.is_first(called):
            self.begin()
        return True

    def is_first(self, called: nn.Module) -> bool:
        """Whether a forward pass begins with this call."""
        return True

    def record(
        self, parts: Sequence[Recordable], capture: CudaCapture, before: Snapshot
    ) -> Sequence[RecordedForward]:
        """Record forward passes that follow each other."""
        return [RecordedForward(part, capture, before) for part in parts]


class ForwardGraphs(_Evaluated, BlockGraphs):
    """The graphs of all blocks of a model, in evaluation. A pass begins with the first block."""

    most_chained = math.inf

    def is_first(self, called: nn.Module) -> bool:
        """Whether a forward pass begins with this call."""
        return called is self.blocks[0] or bool(self.calls[called])

    def call(
        self, block: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Replay a block, or run it. Nothing says that a pass has ended but its last block."""
        try:
            return super().call(block, run, args, kwargs)
        finally:
            if block is self.blocks[-1]:
                self._notes.forget_tensors()

    def give_up(self, problem: str) -> None:
        """Run blocks as they are from now on."""
        if self.problem is None:
            say_once(f"blocks are not replayed as CUDA graphs: {problem}")
        super().give_up(problem)

    def close(self) -> None:
        """Let blocks run as they did before."""
        self.problem = self.problem or "the engine is closed"
        super().close()


class ForwardModel(_Evaluated, ModelGraphs):
    """The graphs of a model's forward pass, in evaluation, or else those of its blocks."""

    most_weights, most_sizes = math.inf, 32
    of_blocks_kind = ForwardGraphs

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], capture: CudaCapture) -> None:
        super().__init__(model, (), blocks, capture)
        self.choose()

    def read(self, kwargs: dict[str, Any]) -> Inputs | None:
        """The inputs of a call; code of the user's own may return something of their width."""
        return read_inputs(self.model, kwargs, widens=is_library_code(self.model))

    def may_change(self, kwargs: dict[str, Any], inputs: Inputs | None) -> bool:
        """It was found out that more padding changes nothing, or it would not be added."""
        return True

    def give_up(self, problem: str) -> None:
        """Replay blocks from now on."""
        super().give_up(problem)
        get_logger().debug("the model is not replayed as a CUDA graph: %s", problem)
        self.choose()

    def close(self) -> None:
        """Let the model run as it did before."""
        super().close()
        self.capture.close()
