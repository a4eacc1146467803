"""Models of users' own, of which the library knows nothing but what a plan says."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 67


class PlainModel(nn.Module):
    """A model of a user's own: no configuration, no marks, just a list of blocks."""

    def __init__(self, dropout: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
                for _ in range(layers)
            ]
        )
        self.head = nn.Linear(16, 64)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        padding = None if attention_mask is None else attention_mask == 0
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=padding)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class CustomAttention(nn.Module):
    """A user's own, which counts its heads in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.output = nn.Linear(32, 32)
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.2)  # or their gradients are mostly round-off

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length = hidden.shape[:2]
        query, key, value = (
            layer(hidden).view(batch, length, self.num_heads, 8).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(attended.transpose(1, 2).reshape(batch, length, -1))


class CustomBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), CustomAttention()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.scale = nn.Parameter(torch.ones(32))
        self.mixer = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm(hidden), mask)
        # A layer that the plan does not name, which reads its child's weights itself.
        mixed, _ = self.mixer(
            hidden, hidden, hidden, key_padding_mask=~mask[:, 0, 0], need_weights=False
        )
        hidden = hidden + mixed
        return hidden + self.scale * self.down(nn.functional.gelu(self.up(hidden)))


PLAN: dict[str, Any] = {
    "blocks": "layers",
    "tensor": {
        "head": "colwise_gather_output",
        "layers.*.attention.query": "colwise",
        "layers.*.attention.key": "colwise",
        "layers.*.attention.value": "colwise",
        "layers.*.attention.output": "rowwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
    },
    "divided": {"layers.*.attention": ["num_heads"]},
}


class UnplannedModel(nn.Module):
    """A model that says nothing of itself, whose head is the embedding's weight, read by hand."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList([CustomBlock() for _ in range(layers)])
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask[:, None, None, :].bool())
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class CustomModel(UnplannedModel):
    """The same with a plan of its own."""

    def rapidformer_plan(self) -> dict[str, Any]:
        return PLAN


class SharedBias(nn.Module):
    """A user's own: a learned bias that every block is given, and a skip from the embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.bias = nn.Linear(16, 16)
        self.layers = nn.ModuleList([_AddingBlock() for _ in range(layers)])
        self.head = nn.Linear(16, VOCABULARY)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, Any]:
        start = hidden = self.embedding(input_ids)
        bias = torch.tanh(self.bias(self.embedding.weight.mean(0)))
        for layer in self.layers:
            hidden = layer(hidden * 1.01, bias)
        logits = self.head(hidden + start)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class _AddingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hidden + torch.tanh(self.inner(hidden) + bias)


class OwnBlock(nn.Module):
    """A user's block, in which tokens meet in torch's attention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), CustomAttention()
        self.wide = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> Any:
        hidden = hidden + self.attention(self.norm(hidden), mask) * scale
        return hidden + self.wide(hidden)


class OwnModel(nn.Module):
    """A user's model; its blocks are told something of every token besides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.ModuleList([OwnBlock() for _ in range(2)])

    def rapidformer_plan(self) -> dict[str, Any]:
        return {"blocks": "layers", "has_split_attention": True}

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, Any]:
        hidden = self.embedding(input_ids)
        scale = 0.5 + torch.arange(input_ids.shape[1])[None, :, None] / 20
        for layer in self.layers:
            hidden = layer(hidden, attention_mask[:, None, None, :].bool(), scale)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class MixingModel(OwnModel):
    """The same with another place where tokens meet, which its plan keeps quiet about."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.wide = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)


class AveragingBlock(OwnBlock):
    """No attention at all."""

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> Any:
        return self.wide(hidden - hidden.mean(dim=1, keepdim=True))


class AveragingModel(OwnModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([AveragingBlock() for _ in range(2)])


class AddNeighbour(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.roll(1, dims=1)
