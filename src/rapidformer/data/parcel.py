"""Small batches on their way from a worker process.

torch shares the memory of every tensor that a worker returns, and the receiver has to open it.
That takes several milliseconds per batch, as long as a whole step of a small model. Up to a
megabyte, sending the values is much faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info

from rapidformer.data.batch import fits_numpy

_LARGE = 2**20
"""Bytes of a batch from which shared memory is faster."""


class Parcel:
    """A batch whose tensors travel by value."""

    def __init__(self, batch: dict[Any, Any]) -> None:
        self._names = [name for name, each in batch.items() if isinstance(each, torch.Tensor)]
        self._values = {**batch, **{name: batch[name].numpy() for name in self._names}}

    def unpack(self) -> dict[Any, Any]:
        """The batch as it was."""
        tensors = {name: torch.from_numpy(self._values[name]) for name in self._names}
        return {**self._values, **tensors}

    def pin_memory(self) -> dict[Any, Any]:
        """The batch in pinned memory; torch's loader calls this in a thread of its own."""
        batch = self.unpack()
        return {**batch, **{name: batch[name].pin_memory() for name in self._names}}


def pack(batch: Any) -> Any:
    """Make a parcel of a small batch, if this is a worker process and its tensors are plain."""
    if get_worker_info() is None or type(batch) is not dict:
        return batch
    size = 0
    for each in batch.values():
        if isinstance(each, torch.Tensor):
            if not fits_numpy(each):
                return batch
            size += each.nbytes
        elif isinstance(each, (dict, list, tuple)):
            return batch  # more tensors may be in it
    return Parcel(batch) if size < _LARGE else batch
