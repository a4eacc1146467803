"""What is recorded of a stack of blocks, such as a model's encoder.

Recordings of a stack share their memory, so in one forward pass only those are used that were
recorded together, in the order in which they were recorded: a graph writes over what later ones
had not yet needed. Each stack has memory of its own: an encoder is replayed whatever size its
decoder has, and new sizes of the one need no new recordings of the other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence

from torch import nn

from rapidformer.accel.cuda_graph.capture import CudaCapture
from rapidformer.accel.cuda_graph.chains import Chain
from rapidformer.accel.cuda_graph.recorded_block import RecordedForward

MOST_SIZES = 24
"""For how many sizes of a micro-batch a stack is recorded."""
_FREE, _REPLAYS = 4, 25
"""How many sizes are recorded in any case, and how many replays pay for each further one: sizes
that were not rounded come back rarely, and a recording takes as long as so many replays save.
"""


def pays(sizes: int, replays: int) -> bool:
    """Whether another size that was not rounded may be recorded after so many."""
    return sizes < _FREE + replays // _REPLAYS


class StackPass:
    """A stack's blocks in one forward pass: noted first, then recorded together."""

    def __init__(self, *, is_noted: bool) -> None:
        self.is_noted = is_noted
        """Whether its calls will be recorded after it."""
        self._chains: dict[Hashable, tuple[int, Chain, RecordedForward]] = {}
        """By the first call of each: its place among them."""
        self._reached = -1
        """The place of the graph that was replayed last: backward passes come in reverse."""

    @property
    def is_recorded(self) -> bool:
        """Whether anything of it can be replayed."""
        return bool(self._chains)

    def keep(self, chains: Sequence[Chain], recorded: Sequence[RecordedForward]) -> None:
        """Note what was recorded of it."""
        pairs = enumerate(zip(chains, recorded, strict=True))
        self._chains = {chain.key: (place, chain, block) for place, (chain, block) in pairs}

    def restart(self) -> StackPass:
        """The same in a new forward pass."""
        self._reached, self.is_noted = -1, False
        return self

    def find(self, key: Hashable) -> tuple[Chain, RecordedForward, Callable[[], bool]] | None:
        """What replays this call, and whether its backward pass may be; None: the block runs."""
        if key not in self._chains:
            return None
        place, chain, recorded = self._chains[key]
        way_back = functools.partial(self._reach, 2 * len(self._chains) - 1 - place)
        return (chain, recorded, way_back) if self._reach(place) else None

    def _reach(self, place: int) -> bool:
        """Whether the graph at this place comes after all that were replayed."""
        is_next = place > self._reached
        self._reached = max(place, self._reached)
        return is_next


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
        return sum(each.is_recorded for each in self._recorded.values())

    def choose(self, key: Hashable, *, is_rounded: bool, may_record: bool) -> StackPass:
        """The recordings of a pass, or one to be noted and recorded after it, or nothing."""
        if key in self._recorded:
            self._replays += 1
            return self._recorded[key].restart()
        # A size that was not rounded may never come again.
        is_back = hash(key) in self._seen and pays(len(self._recorded), self._replays)
        is_due = may_record and (is_rounded or is_back) and len(self._recorded) < MOST_SIZES
        self._seen.add(hash(key))
        fresh = StackPass(is_noted=is_due)
        if is_due:
            self._recorded[key] = fresh
        return fresh

    def forget(self, last: StackPass) -> None:
        """Note such a pass again."""
        self._recorded = {key: each for key, each in self._recorded.items() if each is not last}

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
