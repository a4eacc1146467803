"""One call of attention with a learned bias, and the tensors that its two passes fill."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16


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
    """Which weights dropout keeps, one bit for each, from ``launch.draw``."""
    dropout: float
    scale: float
    is_causal: bool

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.key.shape[2]


def allocate_output(query: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the output and for the statistics of ``forward.attend``."""
    batch, heads, queries, _ = query.shape
    statistics = query.new_empty((2, batch, heads, round_up(queries)), dtype=torch.float32)
    return allocate_like(query), statistics


def allocate_like(tensor: Tensor) -> Tensor:
    """Memory with a token's heads next to each other, as projections produce and consume them."""
    batch, heads, tokens, size = tensor.shape
    return tensor.new_empty((batch, tokens, heads, size)).transpose(1, 2)


def allocate_kept(seed: Tensor, rows: int, keys: int) -> Tensor:
    """Memory for a bit for each weight: 64 bytes for each 512 keys of a row."""
    return seed.new_empty((rows, (keys + 511) // 512 * 64), dtype=torch.uint8)


def round_up(length: int) -> int:
    """The padded length of a row: with strides of 16, one compiled kernel serves every length."""
    return (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
