"""Train a small model under switches and keep everything that could differ.

The reference is a bare PyTorch loop over the same samples in one process, which knows nothing of
the library: it sees each global batch whole, padded to one length, and divides by its own count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from rapidformer.data.collate import PadCollator
from rapidformer.dist.collectives import sum_over_replicas
from rapidformer.engine import RapidformerEngine
from rapidformer.models.plan import shifts_labels

VOCABULARY = 64
SAMPLES = 44
"""Not a multiple of the global batch: the last update is a smaller one, with fillers."""


@dataclass
class Trace:
    """What a run leaves behind, on the CPU and whole."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    """Of the first update, before clipping."""
    weights: dict[str, np.ndarray]


class CustomModel(nn.Module):
    """A model of a user's own: no configuration, no marks, just a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=attention_mask == 0)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def _bert_config(dropout: float) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def build_model(name: str, dropout: float = 0.0) -> nn.Module:
    """A tiny model of a family, the same for the same seed."""
    torch.manual_seed(7)
    if name == "bert":
        return BertForSequenceClassification(_bert_config(dropout))
    if name == "bert-mlm":
        return BertForMaskedLM(_bert_config(dropout))
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32,
                resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            )
        )  # fmt: skip
    if name == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0,
            )
        )  # fmt: skip
    if name == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
            )
        )  # fmt: skip
    assert name == "custom"
    return CustomModel()


def build_data(name: str) -> list[dict[str, Any]]:
    """Rows of very unequal lengths; some tokens without a label."""
    random = np.random.default_rng(3)
    rows = []
    for _ in range(SAMPLES):
        length = int(random.integers(3, 24))
        ids = random.integers(1, VOCABULARY, length).tolist()
        if name == "bert":
            rows.append({"input_ids": ids, "labels": int(random.integers(0, 2))})
            continue
        labels = [i if random.random() < 0.6 else -100 for i in ids]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def run_reference(
    model_name: str,
    *,
    order: list[list[int]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    clip: float = 1.0,
) -> Trace:
    """The bare loop: one process, each global batch in one piece."""
    model, rows = build_model(model_name), build_data(model_name)
    optimizer = make_optimizer(model)
    collate = PadCollator()
    losses: list[float] = []
    gradients: dict[str, np.ndarray] = {}
    model.train()
    for indices in order:
        batch = collate([rows[i] for i in indices])
        output = model(**batch)
        loss = output["loss"]
        loss.backward()
        if not gradients:
            gradients = _get_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trace(losses, gradients, _get_weights(model))


def run_switched(
    model_name: str,
    settings: dict[str, Any],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    epochs: int,
) -> Trace:
    """The same run through the engine; called in every process."""
    engine = RapidformerEngine(args=settings)
    model = build_model(model_name)
    rows = build_data(model_name)
    loader = engine.build_data_loader(rows, shuffle=True)
    optimizer = make_optimizer(model)
    model, optimizer, _ = engine.compose(
        model, optimizer, lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    )
    is_shifted = shifts_labels(model)
    losses, gradients = [], {}
    model.train()
    for _ in range(epochs):
        loss_sum = torch.zeros(1)
        for batch in loader:
            loss = model(**batch)["loss"]
            weight = loader.info.shifted_labels if is_shifted else loader.info.labels
            engine.backward(loss, weight)
            if weight:
                loss_sum += loss.detach() * weight
            if not loader.is_update_end:
                continue
            if not gradients:
                gradients = _get_gradients(model)
            total = sum_over_replicas(loss_sum)
            losses.append(float(total / engine.clock.total_weight))
            loss_sum = torch.zeros(1)
            engine.step()
    trace = Trace(losses, gradients, _get_weights(model))
    engine.close()
    return trace


def get_order(settings: dict[str, Any], epochs: int) -> list[list[int]]:
    """The samples of every global batch, in one process's eyes."""
    engine = RapidformerEngine(args={**settings, "micro_batch_size": settings["global_batch_size"]})
    loader = engine.build_data_loader(
        list(range(SAMPLES)), lambda rows: torch.tensor(rows), shuffle=True
    )
    return [batch.tolist() for _ in range(epochs) for batch in loader]


def get_difference(mine: Trace, reference: Trace) -> dict[str, float]:
    """The worst relative differences; a gradient that is zero in theory counts against the norm."""
    norm = np.sqrt(sum(float((g**2).sum()) for g in reference.gradients.values()))
    gradient = {
        name: float(np.linalg.norm(mine.gradients[name] - g))
        / max(float(np.linalg.norm(g)), 1e-6 * norm)
        for name, g in reference.gradients.items()
    }
    weight = {
        name: float(np.linalg.norm(mine.weights[name] - w)) / max(float(np.linalg.norm(w)), 1e-3)
        for name, w in reference.weights.items()
    }
    pairs = zip(mine.losses, reference.losses, strict=True)
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in pairs),
        "gradient": max(gradient.values()),
        "weight": max(weight.values()),
    }


def _whole(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().numpy().copy()


def _get_gradients(model: nn.Module) -> dict[str, np.ndarray]:
    return {n: _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def _get_weights(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: _whole(p) for name, p in model.named_parameters()}
