"""Train a small model under switches and keep everything that could differ.

The reference is a bare PyTorch loop over the same samples in one process, which knows nothing of
the library: it sees each global batch whole, padded to one length, and divides by its own count.
It is one for all kinds of parallelism (``run_bare``).
What is kept, and how it is compared, is what ``rapidformer verify`` keeps and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    T5Config,
    T5ForConditionalGeneration,
)

from rapidformer.data.collate import PadCollator
from rapidformer.engine import RapidformerEngine
from rapidformer.optim.observer import observe_runs
from rapidformer.verification.compare import Comparison, compare
from rapidformer.verification.recorder import (
    Recorder,
    collect_gradients,
    collect_weights,
    count_bytes,
    find_ties,
)
from rapidformer.verification.trace import Trace

Rows = list[dict[str, Any]]
VOCABULARY = 64
SAMPLES = 44
"""Not a multiple of the global batch: the last update is a smaller one, with fillers."""


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


def build_data(name: str) -> Rows:
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


def run_bare(
    model: nn.Module,
    updates: list[list[Rows]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    clip: float = 1.0,
) -> Trace:
    """What every parity test compares with: a loop of torch, in one process, without the library.

    An update is its micro-batches; mostly it is one, the whole global batch. Where a loss is not a
    mean over labels (a mixture's is one over its micro-batch), the same ones must be added up.
    """
    optimizer = make_optimizer(model)
    trace = start_bare_trace(model)
    trace.facts["parameter_bytes"] = count_bytes(model)
    model.train()
    for micro_batches in updates:
        loss = _accumulate(model, [collate(rows) for rows in micro_batches])
        note_bare_gradients(trace, model, loss)
        trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = collect_weights(model)
    return trace


def _accumulate(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The backward pass of an update; its loss, a mean over its labels."""
    if len(batches) == 1:
        loss: torch.Tensor = model(**batches[0])["loss"]
        loss.backward()
        return loss
    loss_sum, count = torch.zeros(()), 0
    for batch in batches:
        weight = count_labels(batch["labels"], is_shifted=True)
        if weight:
            loss = model(**batch)["loss"] * weight
            loss.backward()
            loss_sum, count = loss_sum + loss.detach(), count + weight
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= count
    return loss_sum / count


def cut_updates(rows: Rows, size: int) -> list[list[Rows]]:
    """Global batches in the data's order, each in one piece; the last one may be smaller."""
    return [[rows[start : start + size]] for start in range(0, len(rows), size)]


def collate(rows: Rows) -> dict[str, torch.Tensor]:
    if "pixel_values" in rows[0]:
        return {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
    return PadCollator()(rows)


def count_labels(labels: torch.Tensor, *, is_shifted: bool) -> int:
    return int(((labels[:, 1:] if is_shifted else labels) != -100).sum())


def start_bare_trace(model: nn.Module) -> Trace:
    """What stands before the first update of a loop without the library."""
    return Trace(start=collect_weights(model), ties=find_ties(model))


def note_bare_gradients(trace: Trace, model: nn.Module, loss: torch.Tensor) -> None:
    """Take down an update of such a loop, before it clips."""
    trace.losses.append((loss.item(), 1.0))
    trace.samples.append((0, 0))
    trace.gradients.append(collect_gradients(model))


def run_switched(
    model_names: str | list[str],
    settings: dict[str, Any],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    epochs: int,
) -> dict[str, Trace]:
    """The same runs through the engine; called in every process."""
    traces = {}
    for name in [model_names] if isinstance(model_names, str) else model_names:
        recorder = Recorder()
        with observe_runs(recorder):
            engine = _train(name, settings, make_optimizer, epochs)
        traces[name] = recorder.finish()
    engine.close()
    return traces


def _train(
    name: str,
    settings: dict[str, Any],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    epochs: int,
) -> RapidformerEngine:
    engine = RapidformerEngine(args=settings)
    model = build_model(name)
    loader = engine.build_data_loader(build_data(name), shuffle=True)
    engine.compose(
        model,
        make_optimizer(model),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0),
    )
    model.train()
    for _ in range(epochs):
        for batch in loader:
            loss = model(**batch)["loss"]
            engine.backward(loss)
            engine.step()
    return engine


def get_order(settings: dict[str, Any], epochs: int) -> list[list[int]]:
    """The samples of every global batch, in one process's eyes."""
    engine = RapidformerEngine(args={**settings, "micro_batch_size": settings["global_batch_size"]})
    loader = engine.build_data_loader(
        list(range(SAMPLES)), lambda rows: torch.tensor(rows), shuffle=True
    )
    return [batch.tolist() for _ in range(epochs) for batch in loader]


LIMITS = {"loss": 1e-6, "gradient norm": 1e-5, "gradients": 1e-5, "updated weights": 1e-5}
"""The contract is 1e-5 of everything, over ten updates."""
FIRST_LIMITS = {"loss": 1e-6, "gradient norm": 1e-6, "gradients": 1e-6}
"""Before round-off has gone through an update, it is held to less."""


def check_equal(reference: Trace, traces: list[Trace], *, first_limits: Any = None) -> Comparison:
    """Every process's view beside one process: all updates, and the first one more strictly."""
    comparison = compare(reference, traces, LIMITS)
    assert comparison.is_equal, comparison.describe_failures()
    first = compare(
        take_first(reference), [take_first(trace) for trace in traces], first_limits or FIRST_LIMITS
    )
    assert first.is_equal, f"at the first update, {first.describe_failures()}"
    return comparison


def take_first(trace: Trace) -> Trace:
    """The first update alone."""
    parts = {name: getattr(trace, name)[:1] for name in ("losses", "samples", "norms", "gradients")}
    return replace(trace, **parts, weights=trace.start)
