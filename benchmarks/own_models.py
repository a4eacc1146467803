"""Models as users write them, without those of transformers, for ``held_models.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel
from transformers.utils import ModelOutput


@dataclass
class Output(ModelOutput):
    """What the models return."""

    loss: Tensor | None = None
    logits: Tensor | None = None


@dataclass
class Sizes:
    """Of either model."""

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    longest: int = 1024


class Attention(nn.Module):
    """Causal self-attention, as in nanoGPT."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.num_attention_heads
        self.c_attn = nn.Linear(sizes.hidden_size, 3 * sizes.hidden_size)
        self.c_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        shape = rows, length, self.heads, width // self.heads
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))
        return projected


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(sizes.hidden_size), Attention(sizes)
        self.ln_2 = nn.LayerNorm(sizes.hidden_size)
        self.c_fc = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.c_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(functional.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """A language model in the style of nanoGPT."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes = Sizes(**sizes)
        self.wte = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.wpe = nn.Embedding(sizes.longest, sizes.hidden_size)
        self.h = nn.ModuleList(Block(sizes) for _ in range(sizes.num_hidden_layers))
        self.ln_f = nn.LayerNorm(sizes.hidden_size)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Output:
        """Padding stands on the right, so it needs no mask."""
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if labels is None:
            return Output(logits=logits)
        wanted = logits[:, :-1].flatten(0, 1).float()
        loss = functional.cross_entropy(wanted, labels[:, 1:].flatten(), ignore_index=-100)
        return Output(loss, logits)


class Classifier(nn.Module):
    """A classifier of texts around torch's encoder."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes = Sizes(**sizes)
        self.words = nn.Embedding(sizes.vocab_size, sizes.hidden_size, padding_idx=0)
        self.places = nn.Parameter(torch.randn(sizes.longest, sizes.hidden_size) * 0.02)
        layer = nn.TransformerEncoderLayer(
            sizes.hidden_size, sizes.num_attention_heads, sizes.intermediate_size,
            activation="gelu", batch_first=True,
        )  # fmt: skip
        self.encoder = nn.TransformerEncoder(layer, sizes.num_hidden_layers)
        self.head = nn.Linear(sizes.hidden_size, 2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Output:
        x = self.words(input_ids) + self.places[: input_ids.size(1)]
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        mask = attention_mask.unsqueeze(-1)
        logits = self.head((x * mask).sum(1) / mask.sum(1))
        if labels is None:
            return Output(logits=logits)
        return Output(functional.cross_entropy(logits, labels), logits)


class AroundBert(nn.Module):
    """A classifier of texts around a model of transformers."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.sizes = Sizes(**sizes)
        self.bert = BertModel(BertConfig(**sizes), add_pooling_layer=False)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(self.sizes.hidden_size, 2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Output:
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.head(self.dropout(hidden[:, 0]))
        if labels is None:
            return Output(logits=logits)
        return Output(functional.cross_entropy(logits, labels), logits)
