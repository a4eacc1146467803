"""The blocks of a GPT: norm, attention, norm, feed-forward, each added to the residual stream.

A block with a mixture of experts returns ``(hidden, loss)``, a dense one only the hidden states.
The loss is a return value rather than an attribute, so that it survives recompute, compile and
sharding.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from rapidformer.dist.token_losses import compute_losses_by_tokens, is_split_over_tokens
from rapidformer.dist.vocabulary import compute_split_losses, is_split_over_vocabulary
from rapidformer.models.gpt.attention import ResidualLinear, Rotation, SelfAttention
from rapidformer.models.gpt.configuration import GPTConfig
from rapidformer.models.gpt.experts import MixtureOfExperts, activate


def build_norm(config: GPTConfig) -> nn.Module:
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.layernorm_epsilon)


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
        return self.down(activate(self.up(hidden), gate))  # type: ignore[no-any-return]


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
        self,
        hidden: Tensor,
        visible: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: Cache | None = None,
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
