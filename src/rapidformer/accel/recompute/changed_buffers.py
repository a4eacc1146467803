"""Recomputing blocks that change their buffers as they run, such as BatchNorm's statistics.

The backward pass runs such a block again. It must find the buffers as they were, and must not
change them a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.compat.torch_tensors import count_changes

Place = tuple[nn.Module, str]
"""A module, and the name of one of its buffers."""


class BlockBuffers:
    """The buffers of a block, and which of them its forward pass changes."""

    def __init__(self, block: nn.Module) -> None:
        self.places: list[Place] = [
            (module, name)
            for module in block.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        # None before the first pass. From then on only these are copied: most buffers are masks
        # and tables that never change, and they can be large.
        self._changing: set[Place] | None = None

    def run(self, run: Callable[[], Any]) -> tuple[Any, dict[Place, Tensor]]:
        """The result of a pass, and what the buffers that it changed held before."""
        held = {place: getattr(*place) for place in self.places}
        changes = {place: count_changes(buffer) for place, buffer in held.items()}
        copied = self.places if self._changing is None else self._changing
        copies = {place: held[place].clone() for place in copied}
        output = run()
        found = {
            place
            for place, buffer in held.items()
            if getattr(*place) is not buffer or count_changes(buffer) != changes[place]
        }
        if self._changing is None:
            # torch's batch_norm changes its statistics without counting it. Comparing values waits
            # for the device, but only in the first pass.
            found |= {place for place in copies if not torch.equal(copies[place], held[place])}
        # A BatchNorm that was frozen in the first pass counts its batches from now on.
        trained = {module for module, name in found if name == "num_batches_tracked"}
        found |= {place for place in self.places if place[0] in trained}
        self._changing = (self._changing or set()) | found
        # Without a copy, recomputing at least does not change a buffer again.
        return output, {
            place: copies[place] if place in copies else held[place].clone()
            for place in self._changing
        }


class RepeatedPass:
    """One pass of a block, which runs again with the same buffers."""

    def __init__(self, buffers: BlockBuffers, run: Callable[..., Any]) -> None:
        self._buffers, self._run = buffers, run
        self._before: dict[Place, Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            with _replaced(self._before):
                return self._run(*args, **kwargs)
        output, self._before = self._buffers.run(lambda: self._run(*args, **kwargs))
        return output


@contextmanager
def _replaced(before: dict[Place, Tensor]) -> Iterator[None]:
    """Replace the current buffers with copies of these for a while."""
    # Not in place: autograd refuses a buffer that has changed since it was saved.
    current = {place: getattr(*place) for place in before}
    try:
        for place, buffer in before.items():
            setattr(*place, buffer.clone())
        yield
    finally:
        for place, buffer in current.items():
            setattr(*place, buffer)
