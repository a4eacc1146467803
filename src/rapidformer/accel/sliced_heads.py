"""Falcon's keys and values by slices: lists are copied to the GPU and waited for, per block."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rapidformer.accel.assembly import Assembly
from rapidformer.compat.transformers_models import SPLIT_HEADS, is_falcon_attention
from rapidformer.overlay import extend


def apply(assembly: Assembly) -> str | None:
    """Slice the heads of Falcon's attention."""
    layers = [module for module in assembly.model.modules() if is_falcon_attention(type(module))]
    for layer in layers:
        extend(layer, "heads", _build_attention, is_shared=True)
    return f"of {len(layers)} attention layers" if layers else None


def _build_attention(cls: Any) -> dict[str, Any]:
    def split(self: Any, fused: Tensor) -> tuple[Tensor, ...]:
        rows, tokens, _ = fused.shape
        if self.new_decoder_architecture:
            # Groups of heads, each followed by their key and value.
            per_group = self.num_heads // self.num_kv_heads
            heads = fused.view(rows, tokens, -1, per_group + 2, self.head_dim)
            query = heads[..., :-2, :]
            pair = (heads[..., -2:-1, :].expand_as(query), heads[..., -1:, :].expand_as(query))
            return tuple(part.flatten(2, 3) for part in (query, *pair))
        if self.multi_query:
            heads = fused.view(rows, tokens, self.num_heads + 2, self.head_dim)
            return heads[..., :-2, :], heads[..., -2:-1, :], heads[..., -1:, :]
        return getattr(cls, SPLIT_HEADS)(self, fused)

    return {SPLIT_HEADS: split}
