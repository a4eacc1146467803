"""The blocks of a GPT: norm, attention, norm, feed-forward, each added to the residual stream.

A block with a mixture of experts returns ``(hidden, loss)``, a dense one only the hidden states.
The loss is a return value rather than an attribute, so that it survives recompute, compile and
sharding.

Masks here say where a token may *look*, as torch's attention expects; Megatron's say where it may
not. ``build_visibility`` is the one place that inverts them. No mask at all is the fast path:
torch's kernels handle "causal" without an s x s tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from rapidformer.dist.vocabulary import (
    compute_losses_by_tokens,
    compute_split_losses,
    is_split_over_tokens,
    is_split_over_vocabulary,
)
from rapidformer.errors import ModelError
from rapidformer.models.gpt.configuration import GPTConfig
from rapidformer.models.gpt.experts import MixtureOfExperts, activate

Rotation = tuple[Tensor, Tensor]


def build_norm(config: GPTConfig) -> nn.Module:
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.layernorm_epsilon)


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
        self, hidden: Tensor, visible: Tensor | None, rotation: Rotation | None, cache: Cache | None
    ) -> Tensor:
        query, key, value = (
            self._split_heads(project(hidden)) for project in (self.query, self.key, self.value)
        )
        if rotation is not None:
            query, key = _rotate(query, rotation), _rotate(key, rotation)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_index)
        # A single query is a generation step: it attends to everything in the cache.
        is_causal = visible is None and (cache is None or query.shape[2] > 1)
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=self.is_grouped,
        )  # fmt: skip
        return self.output(attended.transpose(1, 2).flatten(2))

    def _split_heads(self, projected: Tensor) -> Tensor:
        """[batch, tokens, heads x size] -> [batch, heads, tokens, size]"""
        return projected.view(*projected.shape[:2], -1, self.head_size).transpose(1, 2)


class FeedForward(nn.Module):
    """The dense feed-forward network: GELU, or SwiGLU with a gate."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.ffn_hidden_size is not None
        size, width, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        self.gate = nn.Linear(size, width, bias=bias) if config.swiglu else None
        self.up = nn.Linear(size, width, bias=bias)
        self.down = ResidualLinear(width, size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        gate = self.gate(hidden) if self.gate is not None else None
        return self.down(activate(self.up(hidden), gate))


class TransformerLayer(nn.Module):
    """One block."""

    def __init__(self, config: GPTConfig, layer_index: int) -> None:
        super().__init__()
        num_experts = config.experts_per_layer[layer_index]
        self.dropout = config.hidden_dropout
        self.attention_norm = build_norm(config)
        self.attention = SelfAttention(config, layer_index)
        self.feed_forward_norm = build_norm(config)
        self.feed_forward: nn.Module = (
            MixtureOfExperts(config, num_experts) if num_experts > 1 else FeedForward(config)
        )

    def forward(
        self, hidden: Tensor, visible: Tensor | None, rotation: Rotation | None, cache: Cache | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        attended = self.attention(self.attention_norm(hidden), visible, rotation, cache)
        hidden = hidden + self._drop(attended)
        output = self.feed_forward(self.feed_forward_norm(hidden))
        if isinstance(output, tuple):
            output, loss = output
            return hidden + self._drop(output), loss
        return hidden + self._drop(output)

    def _drop(self, update: Tensor) -> Tensor:
        return functional.dropout(update, self.dropout, self.training)


def compute_token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token, [batch, tokens] in fp32; 0 where the label is -100."""
    if is_split_over_vocabulary(logits):
        return compute_split_losses(logits, labels)
    if is_split_over_tokens(logits):
        return compute_losses_by_tokens(logits, labels)
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none"
    )
    # Copied: fully_shard warns about a model that returns a view, since writing to it is unsafe.
    return losses.view_as(labels).clone()


# --- where one may look --------------------------------------------------------------------------


def build_visibility(attention_mask: Tensor | None, tokens: Tensor, past: int) -> Tensor | None:
    """True where a token may look, [b or 1, 1, tokens, past + tokens]; None is plain causal.

    A mask of four dimensions is Megatron's: True is hidden, and it is used as it is, unless it is
    marked as plain causal. One of two is Hugging Face's: 1 is a real token, 0 is padding.
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


def _rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first dimensions of each head (all, by default) by the angles of its position."""
    cosine, sine = rotation
    turned, kept = heads.tensor_split([cosine.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosine + torch.cat([-second, first], dim=-1) * sine
    return torch.cat([turned.to(heads.dtype), kept], dim=-1)
