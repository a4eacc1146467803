"""Replay parts of a model by themselves, where the code around them must run in every step.

A step that counts, prints or reads a value cannot be one graph. Its model's passes can be
(``model_graphs.py``), or else the passes of its blocks (``block_graphs.py``): to autograd, what is
replayed is one operation. In evaluation, nothing goes back (``forward_graphs.py``).
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.block_calls import may_record
from rapidformer.accel.cuda_graph.capture import CudaCapture
from rapidformer.accel.cuda_graph.recorded_block import (
    GradientMemory,
    Recordable,
    RecordedBlock,
    RecordedForward,
)
from rapidformer.accel.cuda_graph.replayed_code import ReplayedCode
from rapidformer.accel.cuda_graph.snapshot import Snapshot
from rapidformer.overlay import extend


class Pieces(ABC):
    """The graphs of parts of a model."""

    learns = True
    """Whether backward passes follow."""
    description = ""
    """What is replayed."""

    def __init__(self, model: nn.Module, capture: CudaCapture, code: ReplayedCode) -> None:
        self.model, self.capture, self.device = model, capture, capture.device
        self._code = code
        self._gradients: GradientMemory = {}
        self._number = 0
        """Of the forward pass: what it leaves for its backward pass lasts until the next one."""
        self._is_running = False
        effect = code.examination.effect
        self.problem: str | None = None if effect is None else str(effect)
        """Why nothing is replayed; None while it may be."""

    @property
    @abstractmethod
    def count(self) -> int:
        """For how many sizes of a micro-batch there are graphs."""

    @contextmanager
    def passing(self, *, begins: bool = True) -> Iterator[None]:
        """Inside, the forward pass of a micro-batch runs or goes on; a backward pass follows."""
        if begins:
            self.begin()
        self._is_running = self.problem is None
        try:
            yield
        finally:
            self._is_running = False

    def begin(self) -> None:
        """A forward pass begins."""
        self._number += 1

    def end(self) -> None:
        """What the forward pass has left for its backward pass is gone."""
        self._number += 1

    def is_replayed(self, called: nn.Module) -> bool:
        """Whether the model, or a block of it, may be replayed if it is called now."""
        # A checkpoint runs it once more, and wants the same tensors saved.
        return self._is_running and may_record()

    def record(
        self, parts: Sequence[Recordable], capture: CudaCapture, before: Snapshot
    ) -> Sequence[RecordedForward]:
        """Record parts that follow each other; ``before`` is the state in which each begins."""
        recorded = [RecordedBlock(part, capture, self._gradients, before) for part in parts]
        for each in reversed(recorded):
            each.record_backward()
        for each in recorded:
            each.release()
        return recorded

    def replay(
        self, recorded: RecordedForward, call: Any, numbers: Tensor, may_go_back: Callable[[], bool]
    ) -> Any:
        """The output of a call that begins with these random numbers."""
        number = self._number
        return recorded.replay(call, numbers, lambda: number == self._number and may_go_back())

    def give_up(self, problem: str) -> None:
        """Let everything run as it is from now on."""
        self.problem, self._is_running = self.problem or problem, False

    def close(self) -> None:
        """Let the model run as it did before."""
        self.give_up("the engine is closed")


class _Owner(Protocol):
    """What surrounds a model's forward pass."""

    model: nn.Module

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any: ...


def surround(model: nn.Module, layer: str, owner: _Owner) -> None:
    """Let ``owner.call`` run the model's forward pass, inside its hooks and autocast."""
    extend(model, layer, functools.partial(_build_surrounded, weakref.ref(owner)))


def _build_surrounded(reference: weakref.ref[_Owner], cls: Any) -> dict[str, Any]:
    """The members of the overlay. A copy of the model has them, too: it must keep nothing alive."""

    @functools.wraps(cls.forward)  # trainers read the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.compile cannot trace weak references.
        owner = None if torch.compiler.is_compiling() else reference()
        run: Callable[..., Any] = functools.partial(cls.forward, self)
        if owner is None or self is not owner.model:
            return run(*args, **kwargs)
        return owner.call(run, args, kwargs)

    return {"forward": forward}
