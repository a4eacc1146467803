"""The addresses of tensors in the device's memory, for kernels that work on many."""

from __future__ import annotations

import torch
from torch import Tensor

from rapidformer.optim.multi_tensor.tables import Mirror, is_recording

_AT_ONCE = 64
"""How many addresses one launch writes while a graph is recorded."""


class Addresses:
    """The addresses of tensors that may move from step to step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mirror = Mirror(torch.int64, device)

    def write(self, addresses: list[int]) -> Tensor:
        """A table of the addresses. A recorded graph fills its own table."""
        if not is_recording(self._device):
            self._mirror.write(addresses)
            return self._mirror.tensor
        return record_addresses(addresses, self._device)


def record_addresses(addresses: list[int], device: torch.device) -> Tensor:
    """Write a table by launches that have the addresses as arguments."""
    from rapidformer.optim.multi_tensor import kernel

    # Triton would compile again for the 0 of an empty tensor.
    known = [address or max(addresses) for address in addresses]
    padded = known + known[-1:] * (-len(known) % _AT_ONCE)
    table = torch.empty(len(padded), dtype=torch.int64, device=device)
    for start in range(0, len(padded), _AT_ONCE):
        some = tuple(address + 1 for address in padded[start : start + _AT_ONCE])
        kernel.write_addresses[(1,)](table[start:], some)
    return table
