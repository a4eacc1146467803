"""One call of attention with a learned bias, and the tensors that its two passes fill."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """The tensors and options of a call, in the order of the operators' arguments."""

    query: Tensor
    """[batch, heads, queries, size]"""
    key: Tensor
    value: Tensor
    bias: Tensor
    seen: Tensor | None
    """False for keys that a query must not see."""
    kept: Tensor | None
    """Which weights dropout keeps, one bit for each, from ``dropout.draw``."""
    dropout: float
    scale: float
    is_causal: bool

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.key.shape[2]


def allocate_output(query: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the output and for the statistics of ``forward.attend``."""
    return allocate_like(query), query.new_empty((2, *query.shape[:3]), dtype=torch.float32)


def allocate_gradients(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the gradients of these four."""
    found = allocate_like(query), allocate_like(key), allocate_like(value)
    return (*found, bias.new_empty(bias.shape))


def allocate_like(tensor: Tensor) -> Tensor:
    """Memory with a token's heads next to each other, as projections produce and consume them."""
    batch, heads, tokens, size = tensor.shape
    return tensor.new_empty((batch, tokens, heads, size)).transpose(1, 2)
