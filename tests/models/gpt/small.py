"""Small GPTs and batches; weights are large, so that whatever goes wrong shows in the output."""

from __future__ import annotations

from typing import Any

import torch

from rapidformer.models import GPTConfig, GPTModel

VOCABULARY = 96
LENGTH = 12
MODERN = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "tie_word_embeddings": False,
    "num_query_groups": 2,
}
EXPERTS = {"num_experts": [4], "moe_layer_freq": 2, "moe_router_topk": 2}
KINDS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "modern": MODERN,
    "experts": EXPERTS,
    "modern experts": MODERN | EXPERTS,
}


def make_config(**values: Any) -> GPTConfig:
    sizes = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48,
        "vocab_size": VOCABULARY, "max_position_embeddings": 32, "init_method_std": 0.3,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    return GPTConfig(**(sizes | values))


def make_model(**values: Any) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(make_config(**values))


def make_tokens(rows: int = 3, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def hide_future(length: int) -> torch.Tensor:
    """Megatron's causal mask [1, 1, s, s]: True is hidden."""
    return torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)


def get_losses(model: GPTModel, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Token losses, whether or not the model has experts."""
    output = model(tokens, None, None, labels=labels)
    losses: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return losses
