"""CUDA graphs: what torch leaves behind when a recording fails."""

from __future__ import annotations

from contextlib import suppress

import torch

PRIVATE_NAMES = {
    "torch._C._cuda_endAllocateToPool": "a failed recording still counts as one that is going on",
}


def stop_allocating(device: torch.device, pool: tuple[int, int]) -> None:
    """End the allocation of memory for a recording, if torch has not done so.

    As long as it lasts, torch releases no cached memory when it runs out of memory.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # it has ended
        torch._C._cuda_endAllocateToPool(index, pool)
