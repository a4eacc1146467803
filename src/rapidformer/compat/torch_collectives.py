"""Collectives as functions of tensors, which ``torch.compile`` can trace; the ranks' store."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d

PRIVATE_NAMES = {
    "torch.distributed.distributed_c10d._get_default_store": "ranks that agree where to stop",
} | {
    f"torch.ops._c10d_functional.{name}": "collectives inside a compiled model"
    for name in (
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "wait_tensor",
    )
}

# The operators are the same in all versions; their Python names are not.
operations: Any = torch.ops._c10d_functional


def get_default_store() -> Any:
    """The key-value store through which the ranks have found each other."""
    return distributed_c10d._get_default_store()
