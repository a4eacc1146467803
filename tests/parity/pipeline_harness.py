"""Small models cut into stages, beside the same models in one process.

Each process holds some of the parameters; their gradients and weights are put together by name, and
a name that several processes hold must be equal on all of them. Rows are of odd lengths, so that
every micro-batch has another shape, and the last update of an epoch is a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rapidformer.engine import RapidformerEngine
from rapidformer.models.gpt import GPTConfig, GPTForCausalLM
from rapidformer.models.plan import shifts_labels
from tests.parity.harness import build_data
from tests.parity.tensor_harness import (
    SETTINGS,
    VOCABULARY,
    CustomModel,
    Trace,
    collate,
    count_bytes,
    count_labels,
    find_ties,
    get_gradients,
    get_weights,
    make_sgd,
)

ROWS = 8
EPOCHS = 2
PIPELINE = "pipeline_model_parallel_size"


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


def _bert(layers: int, dropout: float) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": layers,
        "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 40,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
        "pad_token_id": 0,
    }  # fmt: skip


def _llama(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 40, "head_dim": 8, "pad_token_id": 0, **more,
    }  # fmt: skip


def _build_custom(layers: int) -> nn.Module:
    model = CustomModel()
    block = type(model.layers[0])
    model.layers = nn.ModuleList([block() for _ in range(layers)])
    for layer in model.layers:
        for linear in (layer.attention.query, layer.attention.key):
            nn.init.normal_(linear.weight, std=0.2)  # or their gradients are mostly round-off
    return model


def _freeze(model: nn.Module) -> nn.Module:
    """As adapters would have it: the first stage learns nothing, the others a little."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.3.attn" in name or "h.2.mlp" in name)
    return model


MODELS: dict[str, Callable[[int, float], nn.Module]] = {
    "llama": lambda n, p: LlamaForCausalLM(LlamaConfig(**_llama(n))),
    "qwen3": lambda n, p: Qwen3ForCausalLM(Qwen3Config(**_llama(n, tie_word_embeddings=True))),
    "mistral": lambda n, p: MistralForCausalLM(MistralConfig(**_llama(n, sliding_window=9))),
    "gpt2": lambda n, p: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=n, n_head=4, n_positions=40,
            bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM",
            resid_pdrop=p, embd_pdrop=p, attn_pdrop=p,
        )
    ),
    "bert": lambda n, p: BertForSequenceClassification(BertConfig(**_bert(n, p))),
    "bert-mlm": lambda n, p: BertForMaskedLM(BertConfig(**_bert(n, p))),
    "gpt": lambda n, p: GPTForCausalLM(
        GPTConfig(
            num_layers=n, hidden_size=32, num_attention_heads=4, max_position_embeddings=40,
            vocab_size=68, hidden_dropout=p, attention_dropout=p, init_method_std=0.1,
        )
    ),
    "gpt2-frozen": lambda n, p: _freeze(MODELS["gpt2"](n, p)),
    "custom": lambda n, p: _build_custom(n),
    "shared-bias": lambda n, p: SharedBias(n),
}  # fmt: skip


def build_model(name: str, layers: int, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(7)
    model = MODELS[name](layers, dropout)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases of zero and norms of one would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def run_one(name: str, layers: int, epochs: int = EPOCHS) -> Trace:
    """A bare loop of torch over whole global batches, without the library."""
    model, rows = build_model(name, layers), build_data(name)
    optimizer = make_sgd(model)
    trace = Trace()
    model.train()
    for _ in range(epochs):
        for start in range(0, len(rows), ROWS):
            loss = model(**collate(rows[start : start + ROWS]))["loss"]
            loss.backward()
            trace.losses.append(loss.item())
            if not trace.gradients:
                trace.gradients = get_gradients(model)
            trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    trace.weights, trace.ties = get_weights(model), find_ties(model)
    trace.parameter_bytes = count_bytes(model)
    return trace


def run_staged(cases: list[tuple[str, int, dict[str, Any]]], epochs: int = EPOCHS) -> list[Trace]:
    """The same through the engine; called in every process. One trace per case."""
    traces = []
    for name, layers, settings in cases:
        given = {**SETTINGS, "keep_last": True, **settings}
        engine = RapidformerEngine(args=given)
        model = build_model(name, layers)
        loader = engine.build_data_loader(
            build_data(name), collate, shuffle=False, is_training=True
        )
        engine.compose(model, make_sgd(model), constant)
        traces.append(train(engine, model, loader, epochs))
    engine.close()
    return traces


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def make_forward(model: Any) -> Callable[[Any], Any]:
    is_shifted = shifts_labels(model) or "GPT" in type(model).__name__

    def forward(batch: Any) -> tuple[torch.Tensor, float]:
        labels = batch["labels"]
        loss = model(**batch)["loss"]
        return loss, count_labels(labels, is_shifted=is_shifted and labels.dim() > 1)

    return forward


def train(engine: RapidformerEngine, model: nn.Module, loader: Any, epochs: int) -> Trace:
    trace, forward = Trace(), make_forward(model)
    model.train()
    for _ in range(epochs):
        for update in engine.iterate_updates(loader):
            results = engine.run_update(forward, update)
            total = sum(r.loss.double() * r.weight for r in results if r.weight)
            total = torch.as_tensor(total, dtype=torch.float64)
            group = engine.topology.get_replica_group()
            if group is not None:
                torch.distributed.all_reduce(total, group=group)
            trace.losses.append(float(total / engine.clock.total_weight))
            trace.norms.append(float(engine.clock.grad_norm))
            if len(trace.losses) == 1:  # on every stage, those that learn nothing too
                trace.gradients = get_gradients(model)
            engine.step()
    engine.parallelized.settle()
    trace.weights, trace.ties = get_weights(model), find_ties(model)
    trace.parameter_bytes = count_bytes(model)
    return trace


def join(traces: list[Trace], *, is_bit_equal: bool = True) -> Trace:
    """What all processes hold together; copies must be equal.

    Bit for bit, but where layers are split: sums over processes round differently on each.
    """
    tolerance = 0.0 if is_bit_equal else 1e-5
    joined = Trace(losses=traces[0].losses, norms=traces[0].norms)
    for trace in traces:
        assert np.allclose(trace.losses, joined.losses, rtol=tolerance, atol=0)
        assert np.allclose(trace.norms, joined.norms, rtol=tolerance, atol=0)
        for mine, all_of_them in (
            (trace.gradients, joined.gradients),
            (trace.weights, joined.weights),
        ):
            for key, value in mine.items():
                held = all_of_them.setdefault(key, value)
                distance = np.linalg.norm(held - value)
                assert distance <= tolerance * max(float(np.linalg.norm(held)), 1e-3), key
        joined.parameter_bytes = max(joined.parameter_bytes, trace.parameter_bytes)
        joined.ties |= trace.ties
    return joined
