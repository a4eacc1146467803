"""Attention over rows laid end to end, by the fastest way that is exact on the device.

| where | how |
|---|---|
| CPU | one call per row; for compiled blocks, one operator of ours |
| GPU, 16 bits, a full, causal or sliding mask | flash attention over true lengths |
| GPU otherwise | rows are padded for this call alone |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.unpad.masks import Fused, RowMask, get_largest_head
from rapidformer.accel.unpad.operator import attend_by_row
from rapidformer.compat.torch_attention import attend_with_flash
from rapidformer.errors import ModelError


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: RowMask,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """[1, heads, tokens, size] -> [1, tokens, heads, size]."""
    if any(extra is not None for extra in (softcap, position_bias, s_aux)):
        # At the comparison in compose(), which then leaves the model padded.
        raise ModelError("its attention has soft caps, biases or sinks")
    query, key, value = (_cast(tensor) for tensor in (query, key, value))
    is_on_cpu = query.device.type == "cpu"
    if mask.fused is not None and (is_on_cpu or takes_flash(query, value, mask.fused.largest_head)):
        return _attend_compiled(query, key, value, mask.fused, dropout, scaling)
    if mask.rows.is_fixed:
        raise ModelError("only flash attention takes lengths that change, and it needs 16 bits")
    if mask.fused is not None:
        found: Tensor = torch.compiler.disable(attend_in_grid)(
            query, key, value, mask, dropout, scaling
        )
        return found
    if is_on_cpu:
        return _attend_row_by_row(query, key, value, mask, dropout, scaling)
    if mask.window is not None and takes_flash(query, value, get_largest_head(query.device)):
        return _attend_with_flash(query, key, value, mask, dropout, scaling)
    return attend_in_grid(query, key, value, mask, dropout, scaling)


def takes_flash(query: Tensor, value: Tensor, largest_head: int) -> bool:
    """Whether flash attention takes this type and head size; that of values must be the same."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return False
    size = query.shape[-1]
    return value.shape[-1] == size and size % 8 == 0 and size <= largest_head


def _cast(tensor: Tensor) -> Tensor:
    """As autocast does for torch's own attention; it does not know the operators used here."""
    if tensor.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cuda"))


def _attend_row_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: RowMask,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    lengths = mask.rows.lengths
    pieces: list[Any] = [tensor.split(lengths, dim=2) for tensor in (query, key, value)]
    attended = [
        functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.get_mask(row), dropout_p=dropout, is_causal=mask.is_causal,
            scale=scaling, enable_gqa=k.shape[1] != q.shape[1],
        )
        for row, (q, k, v) in enumerate(zip(*pieces, strict=True))
        if lengths[row]
    ]  # fmt: skip
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()


def _attend_with_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: RowMask,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    assert mask.window is not None
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend_with_flash(
        q, k, v, mask.rows.ends, mask.rows.longest,
        dropout=dropout, window=mask.window, scale=scaling,
    )[None]  # fmt: skip


def _attend_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    fused: Fused,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """One operator, whatever the lengths: a graph of single rows would be different each time."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if query.device.type == "cpu":
        return attend_by_row(q, k, v, fused.ends, dropout, fused.window, scaling)[None]
    return attend_with_flash(
        q, k, v, fused.ends, fused.longest, dropout=dropout, window=fused.window, scale=scaling
    )[None]


def attend_in_grid(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: RowMask,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Pad the rows for torch's own attention: any mask, type and device."""
    rows = mask.rows
    q, k, v = (
        rows.to_grid(tensor[0].transpose(0, 1)).transpose(1, 2) for tensor in (query, key, value)
    )
    # Padding follows the tokens here, so no token of a causal model sees it.
    is_causal = mask.is_causal
    attended = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=None if is_causal else mask.grid, dropout_p=dropout, scale=scaling,
        is_causal=is_causal, enable_gqa=k.shape[1] != q.shape[1],
    )  # fmt: skip
    return rows.from_grid(attended.transpose(1, 2))[None]
