"""Causal self-attention with grouped queries and rotary positions.

Masks here say where a token may *look*, as torch's attention expects; Megatron's say where it may
not. ``build_visibility`` is the one place that inverts them. No mask at all is the fast path:
torch's kernels handle "causal" without an s x s tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from rapidformer.errors import ModelError
from rapidformer.models.gpt.configuration import GPTConfig

Rotation = tuple[Tensor, Tensor]


class ResidualLinear(nn.Linear):
    """A linear layer whose output is added to the residual stream: its weights start smaller."""


class SelfAttention(nn.Module):
    """Each token attends to itself and to those before it."""

    is_causal = True

    def __init__(self, config: GPTConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_size = config.head_size
        self.is_grouped = config.num_query_groups != config.num_attention_heads
        self.dropout = config.attention_dropout
        key_size = config.head_size * (config.num_query_groups or config.num_attention_heads)
        bias = config.add_bias_linear
        # Three layers, not one fused matrix: each can be split by heads and copied by name.
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=bias)
        self.key = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.value = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.output = ResidualLinear(config.hidden_size, config.hidden_size, bias=bias)

    def forward(
        self,
        hidden: Tensor,
        visible: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        query, key, value = (
            self._split_heads(project(hidden)) for project in (self.query, self.key, self.value)
        )
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_index)
        attended = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible,
            dropout_p=self.dropout if self.training else 0.0,
            # A single query is a generation step: it attends to everything in the cache.
            is_causal=visible is None and (cache is None or query.shape[2] > 1),
            enable_gqa=self.is_grouped,
        )
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split_heads(self, projected: Tensor) -> Tensor:
        """[batch, tokens, heads x size] -> [batch, heads, tokens, size]"""
        return projected.view(*projected.shape[:2], -1, self.head_size).transpose(1, 2)


# --- where one may look --------------------------------------------------------------------------


def build_visibility(attention_mask: Tensor | None, tokens: Tensor, past: int) -> Tensor | None:
    """True where a token may look, [b or 1, 1, tokens, past + tokens]; None is plain causal.

    A four-dimensional mask is Megatron's: True is hidden, and it is used as it is, unless it is
    marked as plain causal. A two-dimensional one is Hugging Face's: 1 is a real token, 0 is
    padding.
    """
    length = tokens.shape[1]
    if attention_mask is None or getattr(attention_mask, "is_plain_causal", False):
        if past == 0 or length == 1:
            return None
        return _build_causal(length, past, tokens.device)
    if attention_mask.dim() == 4 and attention_mask.dtype is torch.bool:
        return ~attention_mask
    if attention_mask.dim() == 2:
        causal = _build_causal(length, past, tokens.device)
        visible = causal & attention_mask[:, None, None, :].bool()
        # Padding attends to itself: a row with nothing to attend to would give NaN.
        return visible | causal.triu(past)
    raise ModelError(
        f"attention_mask is {str(attention_mask.dtype).removeprefix('torch.')} of shape "
        f"{list(attention_mask.shape)}: GPTModel takes a bool mask [batch or 1, 1, tokens, tokens] "
        "(True = hidden), a mask [batch, tokens] (1 = real token), or None for plain causal."
    )


def _build_causal(length: int, past: int, device: torch.device) -> Tensor:
    return torch.ones(1, 1, length, past + length, dtype=torch.bool, device=device).tril(past)


# --- rotary positions ----------------------------------------------------------------------------


def build_rotation(position_ids: Tensor, config: GPTConfig) -> Rotation:
    """Cosine and sine of every position's angles, [batch, 1, tokens, rotary size], in fp32."""
    size = config.rotary_size
    steps = torch.arange(0, size, 2, device=position_ids.device, dtype=torch.float32)
    frequencies = 1.0 / config.rotary_base ** (steps / size)
    angles = (position_ids[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first dimensions of each head (all, by default) by the angles of its position."""
    cosine, sine = rotation
    turned, kept = heads.tensor_split([cosine.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosine + torch.cat([-second, first], dim=-1) * sine
    return torch.cat([turned.to(heads.dtype), kept], dim=-1)
