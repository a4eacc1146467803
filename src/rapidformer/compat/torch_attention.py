"""Attention over rows of different lengths, with dropout: torch has no public name for it.

``torch.nn.attention.varlen.varlen_attn`` calls the same kernel, but without dropout, and takes
fewer key and value heads than query heads from torch 2.12 on only.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRIVATE_NAMES = {
    "torch.ops.aten._flash_attention_forward": "attention over true lengths on a GPU",
}


def attend_with_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    dropout: float,
    window: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """[tokens, heads, size] -> the same. Ends and longest rows are those of queries and of keys;
    ends are int32 and begin with 0.
    """
    before, after = window
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, *ends, *longest, dropout, window == (-1, 0), False,
        scale=scale, window_size_left=before, window_size_right=after,
    )[0]  # fmt: skip
    return output
