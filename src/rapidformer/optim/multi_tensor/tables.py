"""Tables on the device: where tensors are, and how they are divided into chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

TYPES = {torch.float32, torch.bfloat16, torch.float16}
"""What the kernels can read and write."""
SETTINGS = 8
"""Numbers that describe a parameter group: ``launch.describe_group``."""
NUMBERS = 10
"""Numbers of a tensor that ``kernel.advance`` computes for ``kernel.update``."""

HOST = torch.device("cpu")
"""Said explicitly: the GPU may be torch's default device."""

# Others may have no memory of their own, or wait for a collective.
_ORDINARY = {Tensor, nn.Parameter}


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether all are ordinary tensors, whose elements are one after the other in memory."""
    return _ORDINARY.issuperset(map(type, tensors)) and all(map(Tensor.is_contiguous, tensors))


def is_recording(device: torch.device) -> bool:
    """Whether launches are recorded for a CUDA graph instead of being run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def build_chunks(sizes: Sequence[int], chunk: int) -> Tensor:
    """For every chunk, its tensor and which of that tensor's chunks it is."""
    with HOST:
        counts = torch.tensor([-(-size // chunk) for size in sizes], dtype=torch.int64)
        tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        first = counts.cumsum(0) - counts
        numbers = torch.arange(len(tensors)) - first[tensors]
        return torch.stack([tensors, numbers], dim=1).to(torch.int32)


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; the host does not wait."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class Mirror:
    """A list of numbers in the device's memory, written only when it changes."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._values: list[int] | list[float] = []
        self.tensor = torch.empty(0, dtype=dtype, device=device)

    def write(self, values: list[int] | list[float]) -> None:
        if values == self._values:
            return
        is_pinned = self._device.type == "cuda"  # so that the host does not wait
        on_host = torch.tensor(values, dtype=self._dtype, device=HOST, pin_memory=is_pinned)
        if len(values) != len(self._values):
            self.tensor = torch.empty_like(on_host, device=self._device)
        # In place, since a recorded graph reads from here.
        self.tensor.copy_(on_host, non_blocking=True)
        self._values = values
