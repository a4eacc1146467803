"""Replay a model's blocks in evaluation and prediction, where nothing learns.

Rows are short and sorted by length, so that launching kernels takes longer than running them. The
number of tokens is rounded up, and a few graphs serve all batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.cuda_graph.block_calls import (
    BlockCall,
    StaticCall,
    describe_mode,
    read_call,
    without_cast_cache,
)
from rapidformer.accel.cuda_graph.block_graphs import MOST_SIZES, round_rows
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.passes import Snapshot
from rapidformer.accel.cuda_graph.recorder import (
    MARGIN,
    CudaCapture,
    choose_rounding,
    describe_error,
    measure_differences,
)
from rapidformer.accel.cuda_graph.replayed_code import ReplayedCode
from rapidformer.accel.unpad.unpadding import prove_filling
from rapidformer.compat.torch_dispatch import tree_leaves, tree_map_only
from rapidformer.compat.torch_modules import call_plainly, get_compiled_call, set_compiled_call
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
    graphs = ForwardGraphs(blocks, device, CudaCapture(device), is_16_bit=is_16_bit)
    if graphs.problem is not None:
        return None
    assembly.applied.on_close(graphs.close)
    round_rows(model)
    return "blocks are replayed as CUDA graphs"


class ForwardGraphs:
    """The forward passes of blocks, by the sizes of their arguments."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        device: torch.device,
        capture: CudaCapture,
        *,
        is_16_bit: bool,
    ) -> None:
        self._capture, self._device, self._first = capture, device, blocks[0]
        self._limit = MARGIN * choose_rounding(is_16_bit=is_16_bit)
        self._code = ReplayedCode((), nn.ModuleList(blocks))
        self._parameters = [parameter for block in blocks for parameter in block.parameters()]
        self._described: Hashable = None
        self._sizes: set[Hashable] = set()
        self._seen: set[int] = set()
        self._recorded: dict[Hashable, _Forward] = {}
        effect = self._code.examination.effect
        self.problem = None if effect is None else str(effect)
        """Why blocks are not replayed; None while they may be."""
        self._calls_before: dict[nn.Module, Any] = {}
        for block in blocks if self.problem is None else ():
            before = self._calls_before[block] = get_compiled_call(block)
            run = before if before is not None else functools.partial(call_plainly, block)
            set_compiled_call(block, functools.partial(self._call, block, run))

    def close(self) -> None:
        """Let blocks run as they did before."""
        for block, before in self._calls_before.items():
            set_compiled_call(block, before)
        self._recorded.clear()
        self._capture.close()

    def _call(self, block: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or block.training or self.problem is not None:
            return run(*args, **kwargs)
        call = read_call(args, kwargs)
        try:
            if block is self._first:
                self._code.check_hooks(())
                places = hash(tuple(p.data_ptr() for p in self._parameters))
                self._described = describe_mode(self._device), self._code.describe(), places
            # Hooks of transformers collect what was asked for.
            has_hooks = self._code.has_hooks
            recorded = None if call is None or has_hooks else self._find(block, run, call)
        except Exception as error:
            # Whatever it is, the block itself runs next: if it fails too, the user sees that.
            self.problem = describe_error(error)
            say_once(f"blocks are not replayed as CUDA graphs: {self.problem}")
            self._recorded.clear()
            recorded = None
        return run(*args, **kwargs) if recorded is None or call is None else recorded.replay(call)

    def _find(self, block: nn.Module, run: Callable[..., Any], call: BlockCall) -> _Forward | None:
        key = (block, call.form, self._described)
        if key in self._recorded:
            return self._recorded[key]
        is_new = hash(key) not in self._seen
        self._seen.add(hash(key))
        if is_new or (call.form not in self._sizes and len(self._sizes) == MOST_SIZES):
            return None
        self._sizes.add(call.form)
        before = Snapshot(self._code.examination.list_tensors(), self._device)
        with without_cast_cache():
            recorded = _Forward(run, call, self._capture, before, self._limit)
        self._recorded[key] = recorded
        return recorded


class _Forward:
    """A recorded forward pass."""

    def __init__(
        self,
        run: Callable[..., Any],
        call: BlockCall,
        capture: CudaCapture,
        before: Snapshot,
        limit: float,
    ) -> None:
        self._static = StaticCall(call, {})
        run_again = functools.partial(run, *self._static.args, **self._static.kwargs)
        expected = capture.warm_up(run_again, forbids_reads=True)
        before.host_numbers.count_unused(0)
        self._output, self._replay = capture.record(run_again)
        self._replay()
        mine, theirs = ([x for x in tree_leaves(o) if isinstance(x, Tensor)] for o in
                        (self._output, expected))  # fmt: skip
        difference = max(measure_differences(mine, theirs), default=0.0)
        if not difference <= limit:
            raise NotRepeatableError(
                f"replaying a block gave other outputs than running it (by {difference:.1e}, "
                "relative)"
            )

    def replay(self, call: BlockCall) -> Any:
        """The output of this call."""
        self._static.fill(call)
        self._replay()
        return tree_map_only(Tensor, torch.clone, self._output)
