"""CUDA graphs: what torch leaves behind when a recording fails."""

from __future__ import annotations

from contextlib import suppress

import torch

PRIVATE_NAMES = {
    "torch._C._cuda_endAllocateToPool": "ending a failed recording, which torch leaves open",
}


def stop_allocating(device: torch.device, pool: tuple[int, int]) -> None:
    """Close a recording's memory pool if torch has left it open.

    Until then, torch frees no cached memory when it runs out.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # already closed
        torch._C._cuda_endAllocateToPool(index, pool)
