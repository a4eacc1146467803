"""``--activation-offload``: keep what a block saves for its backward pass in host memory.

A block's ``__call__`` sends every tensor that autograd saves to pinned memory, on a separate
stream, while the next block computes: around a recomputed block its inputs, around a compiled one
what the compiled forward pass saves. In the backward pass, the first tensor asked for brings back
its whole block and starts on the block before it, so the copies run ahead.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from rapidformer.accel.assembly import Assembly
from rapidformer.compat.torch_dispatch import tree_leaves
from rapidformer.compat.torch_tensors import count_changes
from rapidformer.dist.whole import get_shard
from rapidformer.errors import TrainingError
from rapidformer.overlay import extend


def apply(assembly: Assembly) -> str:
    """Offload the blocks of this rank."""
    build = functools.partial(_build_offload, lane=Lane(assembly.device))
    blocks = assembly.plan.require_blocks(assembly.model, "--activation-offload")
    for block in blocks:
        extend(block, "offload", build, is_shared=True)
    return f"{len(blocks)} blocks, in pinned host memory"


def _build_offload(cls: type[nn.Module], lane: Lane) -> dict[str, Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.__call__(self, *args, **kwargs)
        saved = lane.open(self, [*args, *kwargs.values()])
        with saved_tensors_hooks(saved.pack, saved.unpack):
            return cls.__call__(self, *args, **kwargs)

    return {"__call__": call}


class Lane:
    """The stream on which tensors leave and return; it knows which call of a block came last.

    Device memory always belongs to the computing stream. That stream waits for a copy before it
    frees what was copied, so memory is reused in kernel order, however far ahead the host is;
    ``record_stream`` would hold it until the host checks again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: weakref.ref[SavedTensors] | None = None
        self._leaving: deque[tuple[list[Tensor], torch.cuda.Event]] = deque()
        self._sent: list[Tensor] = []

    def open(self, block: nn.Module, arguments: list[Any]) -> SavedTensors:
        """Where the tensors go that a call of a block with these arguments saves."""
        # The copies of the block before the last one had the whole last block to finish.
        self._let_go(keeping=1)
        saved = SavedTensors(block, arguments, self)
        # Weak, so that a graph dropped without a backward pass drops its copies too.
        self.last = weakref.ref(saved)
        return saved

    def send(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, which may still be in flight."""
        if self.stream is None:
            return tensor.clone()
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        self._sent.append(tensor)
        return host

    def bring(self, copies: list[Copy]) -> torch.cuda.Event | None:
        """Start copying these back; they may be used after the event."""
        if self.stream is None:
            for copy in copies:
                copy.returned = copy.host.clone()
            return None
        self._let_go(keeping=0)
        for copy in copies:
            copy.returned = torch.empty_like(copy.host, device=self.device)
        # Kernels that are still queued may be using their memory.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for copy in copies:
                assert copy.returned is not None
                copy.returned.copy_(copy.host, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the computing stream wait; the host continues."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _let_go(self, *, keeping: int) -> None:
        """Free tensors on the device that have been copied, except those of the last calls."""
        if self.stream is not None and self._sent:
            self._leaving.append((self._sent, self.stream.record_event()))
            self._sent = []
        while len(self._leaving) > keeping:
            self.wait(self._leaving[0][1])
            self._leaving.popleft()


@dataclass(kw_only=True, eq=False)
class Kept:
    """A saved tensor that stays on the device."""

    tensor: Tensor
    version: int


@dataclass(kw_only=True, eq=False)
class Copy:
    """A saved tensor in host memory; several operations may have saved the same one."""

    host: Tensor
    source: StorageWeakRef
    version: int
    times_saved: int = 0
    times_needed: int = 0
    returned: Tensor | None = None


class SavedTensors:
    """What one call of a block saves for its backward pass."""

    def __init__(self, block: nn.Module, arguments: list[Any], lane: Lane) -> None:
        self._block, self._lane, self._previous = block, lane, lane.last
        # Masks and rotary positions: every block gets the same ones.
        tensors = [value for value in tree_leaves(arguments) if type(value) is Tensor]
        self._shared = {_get_place(tensor) for tensor in tensors if not tensor.requires_grad}
        self._copies: list[Copy] = []
        self._latest: dict[tuple[int, Any], Copy] = {}
        self._weights: set[int] | None = None
        self._arrival: torch.cuda.Event | None = None
        self._is_back = False

    def pack(self, tensor: Tensor) -> Kept | Copy:
        """Called by autograd for every tensor that an operation saves."""
        if not self._is_offloaded(tensor):
            return Kept(tensor=tensor, version=count_changes(tensor))
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key, version = (_get_place(tensor), layout), count_changes(tensor)
        copy = self._latest.get(key)
        # Memory is reused: an address identifies a tensor only while that tensor lives.
        if copy is None or copy.source.expired() or copy.version != version:
            source = StorageWeakRef(tensor.untyped_storage())
            copy = Copy(host=self._lane.send(tensor), source=source, version=version)
            self._copies.append(copy)
            self._latest[key] = copy
        copy.times_saved += 1
        return copy

    def unpack(self, packed: Kept | Copy) -> Tensor:
        """Called by autograd for every tensor that the backward pass needs."""
        if isinstance(packed, Kept):
            if count_changes(packed.tensor) != packed.version:
                # Autograd makes this check itself only for tensors without hooks.
                raise TrainingError(
                    "a weight was changed in place between the forward and the backward pass that "
                    "needs it: call backward before the optimizer's step."
                )
            return packed.tensor
        self._bring_back()
        previous = self._previous() if self._previous is not None else None
        if previous is not None:
            previous._bring_back()
        self._wait()
        if packed.returned is None:
            self._lane.wait(self._lane.bring([packed]))
        assert packed.returned is not None
        tensor = packed.returned
        packed.times_needed += 1
        if packed.times_needed % packed.times_saved == 0:
            # Autograd has it now; another pass through the same graph brings it back again.
            packed.returned = None
        return tensor

    def _bring_back(self) -> None:
        if not self._is_back:
            self._is_back = True
            self._arrival = self._lane.bring(self._copies)

    def _wait(self) -> None:
        arrival, self._arrival = self._arrival, None
        self._lane.wait(arrival)

    def __del__(self) -> None:
        # If a graph is dropped halfway, no memory may be freed under a running copy.
        self._wait()

    def _is_offloaded(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device.type != self._lane.device.type:
            return False
        if tensor.numel() == 0:
            return False  # all empty tensors have the same address, and nothing to free
        if self._weights is None:
            # Not earlier: under ZeRO-3 a block's weights are gathered when it is called.
            self._weights = {_get_place(get_shard(p)) for p in self._block.parameters()}
        place = _get_place(tensor)
        if place in self._weights or place in self._shared:
            return False  # it is on the device anyway
        # Kernels must see the same strides again: a copy of an expanded tensor has others.
        return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _get_place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
