"""Small models of every family, made on the spot."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

IDS = torch.arange(12).reshape(2, 6) % 20 + 1


def make_bert(dropout: float = 0.0) -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=24, hidden_size=8, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=8, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def make_gpt2(dropout: float = 0.0) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=24, n_embd=8, n_layer=3, n_head=2, n_positions=8, embd_pdrop=dropout,
            resid_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def make_t5(dropout: float = 0.0) -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=24, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_decoder_layers=3,
            num_heads=2, dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def make_vit(dropout: float = 0.0) -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
            image_size=8, patch_size=4, num_channels=1, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def make_llama(dropout: float = 0.0) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=24, hidden_size=8, intermediate_size=16, num_hidden_layers=3,
            num_attention_heads=2, max_position_embeddings=8, attention_dropout=dropout,
        )
    )  # fmt: skip


class Custom(nn.Module):
    """A user's own: no configuration, no marks of Hugging Face's."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(8, 24)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


MAKERS: dict[str, Callable[..., nn.Module]] = {
    "bert": make_bert,
    "gpt2": make_gpt2,
    "t5": make_t5,
    "vit": make_vit,
    "llama": make_llama,
    "custom": Custom,
}


def make(family: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[family](dropout).train()


GENERATING = {"gpt2", "t5", "llama"}
"""Those that keep keys and values for generation, in training too unless they are told not to."""


def make_batch(family: str) -> dict[str, torch.Tensor]:
    if family == "vit":
        pixels = torch.linspace(-1, 1, 2 * 64).reshape(2, 1, 8, 8)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    if family == "bert":
        return {"input_ids": IDS, "labels": torch.tensor([0, 1])}
    return {"input_ids": IDS, "labels": IDS}


def get_loss(
    model: nn.Module, family: str, seed: int = 1, *, has_cache: bool = True
) -> torch.Tensor:
    torch.manual_seed(seed)
    options = {} if has_cache or family not in GENERATING else {"use_cache": False}
    loss: torch.Tensor = model(**make_batch(family), **options)["loss"]
    return loss


def get_gradients(
    model: nn.Module, family: str, *, has_cache: bool = True
) -> dict[str, torch.Tensor]:
    model.zero_grad()
    get_loss(model, family, has_cache=has_cache).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
