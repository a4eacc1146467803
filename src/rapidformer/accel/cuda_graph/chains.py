"""Blocks of which each gets the output of the one before it: they are replayed as one.

While a chain is replayed, its first block returns a stand-in that is NaN everywhere, the others
hand it on, and the last one returns the output. So a model that does something else with a block's
output cannot do that unseen; only loops of transformers' own are trusted to begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rapidformer.accel.attention.kernel_scope import use_kernels
from rapidformer.accel.attention.own_code.scores import compute_all
from rapidformer.accel.cuda_graph.block_calls import BlockCall, StaticCall
from rapidformer.accel.cuda_graph.snapshot import set_numbers
from rapidformer.accel.later import note_mode
from rapidformer.accel.unpad.masks import RowMask
from rapidformer.compat.torch_dispatch import tree_leaves, tree_map_only
from rapidformer.models.side_effects.examination import Description

_PREVIOUS = -1


class View(NamedTuple):
    """What blocks see when their model is called, besides their arguments."""

    code: Description
    """What their code depends on."""
    places: int
    """Where their weights are."""
    mode: Hashable
    """In which precision they compute."""
    kept: frozenset[str]
    """Which of their outputs transformers keeps."""


@dataclass(frozen=True)
class _Link:
    """An argument: the output of the previous block, or an argument of the first one."""

    number: int


class CallKey(NamedTuple):
    """Which call of a block a recording replays."""

    block: nn.Module
    number: int
    """Of the block's calls in this pass."""
    form: Hashable
    view: View


@dataclass(frozen=True)
class NotedCall:
    """A block's call as it was seen."""

    key: CallKey
    run: Callable[..., Any]
    static: StaticCall | None
    constants: Hashable
    template: Any
    """Its arguments with links in them; None if some come from elsewhere."""
    links: list[int]
    enter_mode: Callable[[], AbstractContextManager[None]]


class Notes:
    """The calls of one forward pass, and where their arguments come from."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.calls: list[NotedCall] = []
        self.code: Description | None = None
        """What the blocks' code depended on at the last look."""
        self._statics: dict[int, tuple[Any, Any]] = {}
        self._values: list[Any] = []
        """The arguments of the first block of the current chain."""
        self._previous: Any = None

    def run(
        self, key: CallKey, run: Callable[..., Any], call: BlockCall, *, is_linked: bool
    ) -> Any:
        """Run a call as it is, and note it; maybe as one that continues a chain."""
        known = {id(value): number for number, value in enumerate(self._values)}
        links = [
            _PREVIOUS if value is self._previous else known.get(id(value)) for value in call.values
        ]
        template = None
        if is_linked and _PREVIOUS in links and None not in links:
            numbers = iter(links)
            template = tree_map_only(
                (Tensor, RowMask), lambda _: _Link(next(numbers) or 0), (call.args, call.kwargs)
            )
        else:
            self._values = call.values
        static = StaticCall(call, self._statics)
        own = [link or 0 for link in links]
        mode = note_mode(self._device)
        self.calls.append(NotedCall(key, run, static, call.constants, template, own, mode))
        self.code = key.view.code
        output = run(*call.args, **call.kwargs)
        self._previous = output if type(output) is Tensor else None
        return output

    def end_chain(self) -> None:
        """Something else runs before the next call."""
        self._previous = None

    def forget_tensors(self) -> None:
        """Let go of the tensors of this pass."""
        self._statics, self._values, self._previous = {}, [], None


class Chain:
    """Calls of which each gets the output of the one before it."""

    def __init__(self, calls: Sequence[NotedCall]) -> None:
        self.key, self.static = calls[0].key, calls[0].static
        self.calls = [replace(call, static=None) for call in calls]
        """What later ones were called with is not needed any more."""
        self.modules = self.blocks = [call.key.block for call in calls]
        self.parameters = [
            parameter
            for parameter in nn.ModuleList(self.blocks).parameters()
            if parameter.requires_grad
        ]
        self._enter_mode = calls[0].enter_mode
        self.stand_in: Any = None
        """What blocks return before the last one."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run all blocks, with the arguments of the first one."""
        # A graph returns values.
        return compute_all(self.run_some(len(self.calls), args, kwargs))

    def run_some(self, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first blocks in the precision they had, and with the same kernels."""
        with self._enter_mode(), use_kernels(self.blocks[0]):
            return self._run_some(count, args, kwargs)

    def _run_some(self, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (Tensor, RowMask))
        ]
        output = self.calls[0].run(*args, **kwargs)
        if self.stand_in is None and type(output) is Tensor:
            nothing = torch.full((), float("nan"), dtype=output.dtype, device=output.device)
            self.stand_in = nothing.expand(output.shape)
        for call in self.calls[1:count]:
            args, kwargs = _resolve(call.template, values, output)
            output = call.run(*args, **kwargs)
        return output


def _resolve(template: Any, values: Sequence[Any], previous: Any) -> Any:
    def find(link: _Link) -> Any:
        return previous if link.number == _PREVIOUS else values[link.number]

    return tree_map_only(_Link, find, template)


def build_chains(calls: Sequence[NotedCall], *, are_linked: bool) -> list[Chain]:
    """The chains that these calls are; each is one by itself unless they ``are_linked``."""
    runs: list[list[NotedCall]] = []
    for call in calls:
        if are_linked and call.template is not None and runs:
            runs[-1].append(call)
        else:
            runs.append([call])
    return [Chain(run) for run in runs]


@dataclass(frozen=True)
class Following:
    """A chain that was replayed, while its other blocks are called."""

    chain: Chain
    call: BlockCall
    """Of the first block."""
    replayed: Any
    numbers: Tensor
    """The random numbers before it."""
    position: int = 1

    @staticmethod
    def start(chain: Chain, call: BlockCall, replayed: Any, numbers: Tensor) -> Following | None:
        """None if the chain is but one block."""
        return None if len(chain.calls) == 1 else Following(chain, call, replayed, numbers)

    def expects(self, block: nn.Module, call: BlockCall) -> bool:
        """Whether this is the next call of the chain."""
        noted, first = self.chain.calls[self.position], self.call.values
        return (
            noted.key.block is block
            and noted.constants == call.constants
            and len(noted.links) == len(call.values)
            and all(
                value is (self.chain.stand_in if link == _PREVIOUS else first[link])
                for value, link in zip(call.values, noted.links, strict=True)
            )
        )

    @property
    def output(self) -> Any:
        """What the block at this position returns."""
        is_last = self.position == len(self.chain.calls) - 1
        return self.replayed if is_last else self.chain.stand_in

    def step(self) -> Following | None:
        """What is still to come."""
        is_last = self.position == len(self.chain.calls) - 1
        return None if is_last else replace(self, position=self.position + 1)

    def recover(self, args: Any, kwargs: Any, device: torch.device) -> Any:
        """The arguments of a call that was not expected, with what the blocks before it return."""
        set_numbers(self.numbers, device)
        output = self.chain.run_some(self.position, self.call.args, self.call.kwargs)
        stand_in = self.chain.stand_in
        return tree_map_only(Tensor, lambda x: output if x is stand_in else x, (args, kwargs))
