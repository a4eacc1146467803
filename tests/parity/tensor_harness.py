"""Small models whose layers are split over processes, beside the same models in one process.

Several models go through one group of processes, one after the other: starting a group costs more
than training them. Sizes are chosen to be awkward: a vocabulary that no number of processes
divides, fewer key/value heads than processes, rows of odd lengths. Runs are recorded and compared
as ``rapidformer verify`` does it; the reference is a bare loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from rapidformer.data.collate import PadCollator
from rapidformer.dist.processes import stop_processes
from rapidformer.engine import RapidformerEngine
from rapidformer.models.gpt import GPTConfig, GPTForCausalLM
from rapidformer.models.plan import shifts_labels
from rapidformer.optim.observer import observe_runs
from rapidformer.verification import compare as verification
from rapidformer.verification import recorder as recording
from rapidformer.verification import trace as tracing
from tests.parity.harness import build_data, note_bare_gradients, start_bare_trace

VOCABULARY = 67
UPDATES = 3
ROWS = 8
SETTINGS = {
    "global_batch_size": ROWS, "micro_batch_size": 2, "lr": 0.1, "clip_grad": 1.0, "seed": 5,
    "log_level": "error",
}  # fmt: skip


class CustomAttention(nn.Module):
    """A user's own, which counts its heads in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.output = nn.Linear(32, 32)

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

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList([CustomBlock() for _ in range(2)])
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


GIVEN_PLANS = {"unplanned": PLAN}
"""What is told to ``compose`` of models that do not say it themselves."""


def _bert(dropout: float) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 40,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
        "pad_token_id": 0,
    }  # fmt: skip


def _llama(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 40, "head_dim": 8, "pad_token_id": 0, **more,
    }  # fmt: skip


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "bert": lambda p: BertForSequenceClassification(BertConfig(**_bert(p))),
    "bert-mlm": lambda p: BertForMaskedLM(BertConfig(**_bert(p))),
    "roberta": lambda p: RobertaForMaskedLM(RobertaConfig(**{**_bert(p), "pad_token_id": 40,
        "max_position_embeddings": 100})),
    "gpt2": lambda p: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=40,
            bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM",
            resid_pdrop=p, embd_pdrop=p, attn_pdrop=p,
        )
    ),
    "t5": lambda p: T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
            dropout_rate=p, decoder_start_token_id=0, pad_token_id=0,
        )
    ),
    "llama": lambda p: LlamaForCausalLM(LlamaConfig(**_llama())),
    "qwen3": lambda p: Qwen3ForCausalLM(Qwen3Config(**_llama(tie_word_embeddings=True))),
    "gemma2": lambda p: Gemma2ForCausalLM(
        Gemma2Config(**_llama(final_logit_softcapping=30.0, attn_implementation="eager"))
    ),
    "mixtral": lambda p: MixtralForCausalLM(MixtralConfig(**_llama(num_local_experts=4))),
    # Learnt activations, whose weights work on a share of the width.
    "apertus": lambda p: ApertusForCausalLM(ApertusConfig(**_llama())),
    # A key's turned part is one for all heads; the first block's feed-forward layer is dense.
    "deepseek": lambda p: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **_llama(num_key_value_heads=4, head_dim=4), q_lora_rank=16, kv_lora_rank=16,
            qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, n_group=1,
            topk_group=1, first_k_dense_replace=1,
        )
    ),
    # A number per head beside the layers.
    "gpt-oss": lambda p: GptOssForCausalLM(
        GptOssConfig(**_llama(num_local_experts=4, num_experts_per_tok=2, sliding_window=8))
    ),
    "phi3": lambda p: Phi3ForCausalLM(Phi3Config(**_llama())),
    "gpt": lambda p: GPTForCausalLM(
        GPTConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=40,
            vocab_size=68, hidden_dropout=p, attention_dropout=p, init_method_std=0.1,
        )
    ),
    "gpt-rope": lambda p: GPTForCausalLM(
        GPTConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
            max_position_embeddings=40, vocab_size=68, hidden_dropout=p, attention_dropout=p,
            position_embedding_type="rope", normalization="RMSNorm", swiglu=True,
            tie_word_embeddings=False, ffn_hidden_size=48, add_bias_linear=False,
        )
    ),
    "gpt-moe": lambda p: GPTForCausalLM(
        GPTConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=40,
            vocab_size=68, hidden_dropout=p, attention_dropout=p, init_method_std=0.1,
            num_experts=4, moe_layer_freq=2,
        )
    ),
    "vit": lambda p: ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            image_size=16, patch_size=4, hidden_dropout_prob=p, attention_probs_dropout_prob=p,
        )
    ),
    "custom": lambda p: CustomModel(),
    "unplanned": lambda p: UnplannedModel(),
}  # fmt: skip


@dataclass
class Trace:
    """What a run leaves behind, whole and on the CPU."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Of the first update, before clipping."""
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    ties: set[tuple[str, ...]] = field(default_factory=set)
    parameter_bytes: int = 0
    """Of this process alone."""
    recorded: tracing.Trace | None = None
    """The same as the library records it: gradients of all updates."""

    @classmethod
    def from_recorded(cls, recorded: tracing.Trace, losses: list[float]) -> Trace:
        return cls(
            losses=losses,
            norms=recorded.norms,
            gradients=recorded.gradients[0],
            weights=recorded.weights,
            ties={tuple(group) for group in recorded.ties},
            parameter_bytes=recorded.facts["parameter_bytes"],
            recorded=recorded,
        )

    def to_recorded(self) -> tracing.Trace:
        """What was put together by hand, in the library's form."""
        return self.recorded or tracing.Trace(
            losses=[(loss, 1.0) for loss in self.losses],
            samples=[(0, 0) for _ in self.losses],
            norms=self.norms,
            start=self.weights,
            gradients=[self.gradients],
            weights=self.weights,
            ties=[list(group) for group in self.ties],
        )


def build_model(name: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(7)
    model = MODELS[name](dropout)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:  # biases of zero and norms of one would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if "position_embeddings" in key or "cls_token" in key:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def build_rows(name: str) -> list[dict[str, Any]]:
    if name != "vit":
        return build_data(name)[: UPDATES * ROWS]
    random = np.random.default_rng(3)
    return [
        {
            "pixel_values": torch.from_numpy(random.normal(size=(3, 16, 16)).astype(np.float32)),
            "labels": int(random.integers(0, 2)),
        }
        for _ in range(UPDATES * ROWS)
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    if "pixel_values" in rows[0]:
        return {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
    return PadCollator()(rows)


def count_labels(labels: torch.Tensor, *, is_shifted: bool) -> int:
    return int(((labels[:, 1:] if is_shifted else labels) != -100).sum())


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    # Adam's default epsilon turns round-off in gradients near zero into whole steps.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, fused=True)


@functools.cache
def run_one(name: str, make_optimizer: Any = make_sgd, epochs: int = 1) -> Trace:
    """A bare loop of torch over whole global batches, without the library."""
    model, rows = build_model(name), build_rows(name)
    optimizer = make_optimizer(model)
    trace = start_bare_trace(model)
    trace.facts["parameter_bytes"] = count_bytes(model)
    model.train()
    for start in [*range(0, len(rows), ROWS)] * epochs:
        loss = model(**collate(rows[start : start + ROWS]))["loss"]
        loss.backward()
        note_bare_gradients(trace, model, loss)
        trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = get_weights(model)
    return Trace.from_recorded(trace, [loss for loss, _ in trace.losses])


def run_split(
    names: list[str], settings: dict[str, Any], make_optimizer: Any = make_sgd, epochs: int = 1
) -> dict[str, Trace]:
    """The same through the engine; called in every process."""
    traces = {name: run_next(name, settings, make_optimizer, epochs) for name in names}
    stop_processes()
    return traces


def run_next(
    name: str, settings: dict[str, Any], make_optimizer: Any = make_sgd, epochs: int = 1
) -> Trace:
    """One model; the processes stay together for the next one."""
    engine = RapidformerEngine(args={**SETTINGS, **settings})
    model = build_model(name)
    loader = engine.build_data_loader(build_rows(name), collate, shuffle=False)
    engine.compose(
        model,
        make_optimizer(model),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0),
        plan=GIVEN_PLANS.get(name),
    )
    return train(engine, model, loader, epochs)


def train(engine: RapidformerEngine, model: nn.Module, loader: Any, epochs: int = 1) -> Trace:
    is_shifted = shifts_labels(model) or "GPT" in type(model).__name__
    recorder = recording.Recorder()
    model.train()
    with observe_runs(recorder):
        recorder.after_compose(engine)
        for _ in range(epochs):
            for batch in loader:
                labels = batch["labels"]
                weight = count_labels(labels, is_shifted=is_shifted and labels.dim() > 1)
                engine.backward(model(**batch)["loss"], weight)
                engine.step()
    recorded = recorder.finish()
    everyone = [recorded.losses]
    group = engine.topology.get_replica_group()
    if group is not None:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, recorded.losses, group=group)
    updates = zip(*everyone, strict=True)
    sums = [[sum(part) for part in zip(*parts, strict=True)] for parts in updates]
    return Trace.from_recorded(recorded, [total / weight for total, weight in sums])


# ---- looking at models ---------------------------------------------------------------------------


get_gradients = recording.collect_gradients
get_weights = recording.collect_weights
count_bytes = recording.count_bytes


def find_ties(model: nn.Module) -> set[tuple[str, ...]]:
    return {tuple(group) for group in recording.find_ties(model)}


def compare(mine: Trace, reference: Trace) -> dict[str, tuple[float, str]]:
    """The worst relative difference of each kind, with the parameter or update it was met in."""
    assert mine.gradients.keys() == reference.gradients.keys()
    found = verification.compare(reference.to_recorded(), [alone(mine.to_recorded(), mine.losses)])
    assert not found.problems, found.problems
    kinds = {
        "loss": "loss", "norm": "gradient norm", "gradient": "gradients",
        "weight": "updated weights",
    }  # fmt: skip
    worst = {kind: found.quantities[name].worst for kind, name in kinds.items()}
    return {kind: (each.value, each.locate()) for kind, each in worst.items()}


def alone(recorded: tracing.Trace, losses: list[float]) -> tracing.Trace:
    """One process's view, with the losses of all of them."""
    place = dict.fromkeys(tracing.AXES, 0)
    return replace(recorded, place=place, losses=[(loss, 1.0) for loss in losses])
