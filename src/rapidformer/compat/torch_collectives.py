"""Collectives as functions of tensors, which ``torch.compile`` can trace."""

from __future__ import annotations

from typing import Any

import torch

PRIVATE_NAMES = {
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
