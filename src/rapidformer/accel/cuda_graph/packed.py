"""Tensors next to each other in device memory, so that one copy from the host fills them all.

A small model's step has a handful of small inputs, and launching a copy for each takes longer than
copying.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
_ALIGNMENT = 256
"""In bytes: kernels are compiled for aligned inputs."""


class PackedTensors:
    """Tensors that keep their addresses."""

    def __init__(self, arrays: Sequence[Array], device: torch.device) -> None:
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._memory = torch.empty(self._starts[-1], dtype=torch.uint8, device=device)
        self.tensors = [
            _view(self._memory[start : start + array.nbytes], array)
            for start, array in zip(self._starts, arrays, strict=False)
        ]
        self.fill(arrays)

    def fill(self, arrays: Sequence[Array]) -> None:
        """Copy in arrays with the same shapes and types; does not wait for the device."""
        is_pinned = self._memory.device.type == "cuda"
        host = torch.empty_like(self._memory, device="cpu", pin_memory=is_pinned)
        memory = host.numpy()
        for start, array in zip(self._starts, arrays, strict=False):
            place = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            place[...] = array
        # torch does not reuse this pinned memory until the copy is done.
        self._memory.copy_(host, non_blocking=True)


def _view(memory: Tensor, array: Array) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    # ``.data``: views share a version counter, so that changing one would invalidate the others,
    # which autograd may have saved.
    return memory.view(dtype).view(array.shape).data
