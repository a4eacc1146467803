"""Replay a model's blocks one by one, where the code around them must run in every step.

A step that counts, prints or reads a value cannot be one graph. Its model's blocks can be: each
gets a graph of its forward pass and one of its backward pass, while the step, the rest of the model
and the loss run as they are. To autograd, a replayed block is one operation.

All graphs share their memory. What a forward pass leaves for its backward pass lasts until blocks
are replayed for the next micro-batch, so graphs are used together only if they were recorded
together. A backward pass that comes later, or that will be differentiated itself, runs the block
again without a graph.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import (
    set_warn_on_accumulate_grad_stream_mismatch as warn_of_other_streams,
)

from rapidformer.accel.cuda_graph.block_calls import BlockCall, StaticCall, read_call
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.passes import Snapshot, get_numbers, set_numbers
from rapidformer.accel.cuda_graph.recorded_block import GradientMemory, RecordedBlock
from rapidformer.accel.cuda_graph.recorder import (
    CudaCapture,
    choose_rounding,
    describe_error,
)
from rapidformer.accel.cuda_graph.replayed_code import ReplayedCode
from rapidformer.accel.unpad.batches import Filling
from rapidformer.accel.unpad.calls import Removal
from rapidformer.compat.torch_modules import call_plainly, get_compiled_call, set_compiled_call
from rapidformer.overlay import find_fact

MOST_SIZES = 24
"""For how many sizes of a micro-batch blocks are recorded."""


class _Together:
    """The blocks that were recorded in one forward pass."""

    def __init__(self, *, is_open: bool) -> None:
        self.blocks: dict[Hashable, RecordedBlock] = {}
        self.statics: dict[int, tuple[Any, Any]] = {}
        """Arguments by their ids, with their static copies: blocks share a mask."""
        self.filled: dict[int, Any] = {}
        """What was copied to each static argument in this pass."""
        self.is_open = is_open
        """Whether more blocks may be recorded."""

    def finish(self) -> None:
        """End the recording: the backward passes, latest block first."""
        self.is_open = False
        self.statics.clear()
        restores = [block.record_backward() for block in reversed(self.blocks.values())]
        for restore in reversed(restores):
            restore()


def round_rows(model: nn.Module) -> None:
    """Let the number of real tokens be one of a few, if padding is removed and that is exact."""
    removal, filling = find_fact(model, Removal), find_fact(model, Filling)
    if removal is not None and filling is not None and filling.is_exact:
        removal.rounds_up = True


class BlockGraphs:
    """The graphs of all blocks of a model."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        device: torch.device,
        capture: CudaCapture,
        *,
        is_16_bit: bool,
        compiles: bool,
    ) -> None:
        self._blocks, self._device, self._capture = blocks, device, capture
        self._compiles, self._rounding = compiles, choose_rounding(is_16_bit=is_16_bit)
        self._code = ReplayedCode((), nn.ModuleList(blocks))
        self._parameters = [parameter for block in blocks for parameter in block.parameters()]
        self._gradients = GradientMemory(blocks, device)
        self._recorded: dict[Hashable, _Together] = {}
        self._seen: set[int] = set()
        self._described: Hashable = None
        """What the blocks' code depends on in this pass."""
        self._places: Hashable = None
        self._number = 0
        self._is_running = False
        self._together: _Together | None = None
        """The blocks of this pass; None before the first is called."""
        self._calls: Counter[nn.Module] = Counter()
        self._calls_before: list[Any] = []
        self.problem: str | None = None
        """Why blocks are not replayed; None while they may be."""
        effect = self._code.examination.effect
        if effect is not None:
            self.problem = str(effect)
            return
        round_rows(model)
        for block in blocks:
            before = get_compiled_call(block)
            self._calls_before.append(before)
            run = before if before is not None else functools.partial(call_plainly, block)
            set_compiled_call(block, functools.partial(self._call, block, run))

    @property
    def count(self) -> int:
        """For how many sizes blocks are replayed."""
        return len(self._recorded) if self.problem is None else 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def close(self) -> None:
        """Let blocks run as they did before."""
        self._give_up("the engine is closed")
        for block, before in zip(self._blocks, self._calls_before, strict=False):
            set_compiled_call(block, before)
        self._calls_before = []

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, the forward pass of a micro-batch runs, which a backward pass follows."""
        if self.problem is not None:
            yield
            return
        self._begin()
        self._is_running = self.problem is None
        try:
            yield
        finally:
            self._is_running = False
        together = self._together
        if together is not None:
            together.filled.clear()
        if together is not None and together.is_open:
            now = get_numbers(self._device)
            try:
                together.finish()
            except Exception as error:  # blocks run again in their backward pass
                self._give_up(describe_error(error))
            set_numbers(now, self._device)

    def _begin(self) -> None:
        self._number += 1
        if self._together is not None:
            for block in self._together.blocks.values():
                block.release()
            warn_of_other_streams(True)
        self._together = None
        self._calls.clear()
        try:
            self._code.check_hooks(())
        except NotRepeatableError as problem:
            self._give_up(str(problem))
        self._described = self._code.describe()
        places = hash(tuple((p.data_ptr(), p.requires_grad) for p in self._parameters))
        if places != self._places:  # weights have moved in memory, or were frozen or unfrozen
            self._recorded.clear()
            self._places = places

    def _call(self, block: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Replay a block, or run it."""
        if not self._is_running or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        call = read_call(args, kwargs)
        recorded = None if call is None else self._find(block, run, call)
        if call is None or recorded is None:
            return run(*args, **kwargs)
        assert self._together is not None
        return recorded.replay(call, self._together.filled, self._is_current(self._number))

    def _is_current(self, number: int) -> Callable[[], bool]:
        return lambda: number == self._number

    def _find(
        self, block: nn.Module, run: Callable[..., Any], call: BlockCall
    ) -> RecordedBlock | None:
        """The graphs of this call, which are recorded if it is time for that."""
        if self._together is None:
            self._together = self._choose(call)
        together = self._together
        self._calls[block] += 1
        key = (block, self._calls[block], call.form)
        if key in together.blocks or not together.is_open:
            return together.blocks.get(key)
        # Until these are released, autograd sums gradients on the recording stream, and says so.
        warn_of_other_streams(False)
        before = Snapshot(self._code.examination.list_tensors(), self._device)
        try:
            recorded = RecordedBlock(
                block, run, call, StaticCall(call, together.statics), self._capture,
                self._gradients, before, rounding=self._rounding, forbids_reads=not self._compiles,
            )  # fmt: skip
        except Exception as error:
            # Whatever it is, the block itself runs next: if it fails too, the user sees that.
            before.restore()
            self._give_up(describe_error(error))
            return None
        together.blocks[key] = recorded
        return recorded

    def _choose(self, call: BlockCall) -> _Together:
        """The recordings of this pass, by its first block."""
        key = (call.form, self._described)
        if key in self._recorded:
            return self._recorded[key]
        # A size that was not rounded may never come again. The first pass may still set things up.
        is_due = call.is_rounded or hash(key) in self._seen
        is_due = is_due and self._number > 1 and len(self._recorded) < MOST_SIZES
        self._seen.add(hash(key))
        together = _Together(is_open=is_due)
        if is_due:
            self._recorded[key] = together
        return together

    def _give_up(self, problem: str) -> None:
        self.problem = self.problem or problem
        self._is_running = False
        self._recorded.clear()
        warn_of_other_streams(True)
