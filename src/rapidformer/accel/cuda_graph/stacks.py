"""What is recorded of a stack of blocks, such as a model's encoder.

Recordings of a stack share their memory, so in one forward pass only those are used that were
recorded together. Each stack has memory of its own: an encoder is replayed whatever size its
decoder has, and new sizes of the one need no new recordings of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.block_calls import BlockCall
from rapidformer.accel.cuda_graph.chains import Chain, Notes
from rapidformer.accel.cuda_graph.recorder import CudaCapture

MOST_SIZES = 24
"""For how many sizes of a micro-batch a stack is recorded."""
_FREE, _REPLAYS = 4, 25
"""How many sizes are recorded in any case, and how many replays pay for each further one: sizes
that were not rounded come back rarely, and a recording takes as long as so many replays save.
"""


def pays(sizes: int, replays: int) -> bool:
    """Whether another size that was not rounded may be recorded after so many."""
    return sizes < _FREE + replays // _REPLAYS


class Recorded(Protocol):
    """The graphs of a chain of blocks, or of a model."""

    def replay(self, call: Any, numbers: Tensor, is_current: Callable[[], bool]) -> Any:
        """The output of this call, which begins with these random numbers.

        ``is_current`` says whether its forward pass is still the last one.
        """


class StackPass:
    """A stack's blocks in one forward pass: noted first, then recorded together."""

    def __init__(self, notes: Notes | None = None, kept: frozenset[str] = frozenset()) -> None:
        self.notes, self.kept = notes, kept
        """``kept``: which outputs of blocks transformers keeps."""
        self.chains: dict[Hashable, tuple[Chain, Recorded]] = {}
        """By the first call of each."""


class Stack:
    """Blocks that are recorded together."""

    def __init__(self, first: nn.Module, capture: CudaCapture) -> None:
        self.first, self.capture = first, capture
        self.current: StackPass | None = None
        """None before the first of its blocks is called."""
        self._recorded: dict[Hashable, StackPass] = {}
        self._seen: set[int] = set()
        """Hashes of keys."""
        self._replays = 0
        """Passes whose size had been recorded."""

    @property
    def count(self) -> int:
        """For how many sizes it is replayed."""
        return sum(bool(each.chains) for each in self._recorded.values())

    def choose(
        self, key: Hashable, kept: frozenset[str], device: torch.device, call: BlockCall,
        *, may_record: bool,
    ) -> StackPass:  # fmt: skip
        """The recordings of a pass, or notes to be recorded after it, or nothing."""
        if key in self._recorded:
            self._replays += 1
            return self._recorded[key]
        # A size that was not rounded may never come again.
        is_back = hash(key) in self._seen and pays(len(self._recorded), self._replays)
        is_due = call.is_rounded or is_back
        self._seen.add(hash(key))
        if not (is_due and may_record and len(self._recorded) < MOST_SIZES):
            return StackPass()
        self._recorded[key] = noted = StackPass(Notes(device), kept)
        return noted

    def end_pass(self) -> StackPass | None:
        """The last pass; another one begins."""
        last, self.current = self.current, None
        return last

    def forget_tensors(self) -> None:
        """Let go of the tensors of this pass."""
        if self.current is not None and self.current.notes is not None:
            self.current.notes.forget()

    def clear(self) -> None:
        """Drop all recordings."""
        self._recorded.clear()


def build_stacks(
    blocks: Sequence[nn.Module], names: Sequence[str], capture: CudaCapture
) -> dict[nn.Module, Stack]:
    """The stack of each block, by its name without numbers: ``encoder.layers``."""
    kinds = [tuple(part for part in name.split(".") if not part.isdigit()) for name in names]
    if len(set(kinds)) < len(list(itertools.groupby(kinds))):
        kinds = [()] * len(blocks)  # they take turns
    stacks: dict[tuple[str, ...], Stack] = {}
    for block, kind in zip(blocks, kinds, strict=True):
        if kind not in stacks:
            stacks[kind] = Stack(block, capture.split() if stacks else capture)
    return {block: stacks[kind] for block, kind in zip(blocks, kinds, strict=True)}
