"""Models by name, tiny and awkward: what a split, a shard or a stage could get wrong is in one.

A vocabulary that no number of processes divides, fewer key/value heads than processes, tied and
fused weights, norms on a share of the heads, a bias that all blocks share, frozen blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
    MistralConfig,
    MistralForCausalLM,
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

from rapidformer.models.gpt import GPTConfig, GPTForCausalLM

VOCABULARY = 67


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


GIVEN_PLANS = {"unplanned": PLAN}
"""What is told to ``compose`` of models that do not say it themselves."""


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


def _bert(dropout: float, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": layers,
        "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 40,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
        "pad_token_id": 0,
    }  # fmt: skip


def llama(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 40, "head_dim": 8, "pad_token_id": 0, **more,
    }  # fmt: skip


def _freeze(model: nn.Module) -> nn.Module:
    """As adapters would have it: the first stage learns nothing, the others a little."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.3.attn" in name or "h.2.mlp" in name)
    return model


MODELS: dict[str, Callable[[float, int], nn.Module]] = {  # of a dropout and a number of blocks
    "bert": lambda p, n: BertForSequenceClassification(BertConfig(**_bert(p, n))),
    "bert-mlm": lambda p, n: BertForMaskedLM(BertConfig(**_bert(p, n))),
    "roberta": lambda p, n: RobertaForMaskedLM(RobertaConfig(**{**_bert(p, n), "pad_token_id": 40,
        "max_position_embeddings": 100})),
    "gpt2": lambda p, n: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=n, n_head=4, n_positions=40,
            bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM",
            resid_pdrop=p, embd_pdrop=p, attn_pdrop=p,
        )
    ),
    "t5": lambda p, n: T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=n, num_heads=4,
            dropout_rate=p, decoder_start_token_id=0, pad_token_id=0,
        )
    ),
    "llama": lambda p, n: LlamaForCausalLM(LlamaConfig(**llama(n))),
    "qwen3": lambda p, n: Qwen3ForCausalLM(Qwen3Config(**llama(n, tie_word_embeddings=True))),
    "gemma2": lambda p, n: Gemma2ForCausalLM(
        Gemma2Config(**llama(n, final_logit_softcapping=30.0, attn_implementation="eager"))
    ),
    "mixtral": lambda p, n: MixtralForCausalLM(MixtralConfig(**llama(n, num_local_experts=4))),
    # Learnt activations, whose weights work on a share of the width.
    "apertus": lambda p, n: ApertusForCausalLM(ApertusConfig(**llama(n))),
    # A key's turned part is one for all heads; the first block's feed-forward layer is dense.
    "deepseek": lambda p, n: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **llama(n, num_key_value_heads=4, head_dim=4), q_lora_rank=16, kv_lora_rank=16,
            qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, n_group=1,
            topk_group=1, first_k_dense_replace=1,
        )
    ),
    # A number per head beside the layers.
    "gpt-oss": lambda p, n: GptOssForCausalLM(
        GptOssConfig(**llama(n, num_local_experts=4, num_experts_per_tok=2, sliding_window=8))
    ),
    "phi3": lambda p, n: Phi3ForCausalLM(Phi3Config(**llama(n))),
    "gpt": lambda p, n: GPTForCausalLM(
        GPTConfig(
            num_layers=n, hidden_size=32, num_attention_heads=4, max_position_embeddings=40,
            vocab_size=68, hidden_dropout=p, attention_dropout=p, init_method_std=0.1,
        )
    ),
    "gpt-rope": lambda p, n: GPTForCausalLM(
        GPTConfig(
            num_layers=n, hidden_size=32, num_attention_heads=4, num_query_groups=2,
            max_position_embeddings=40, vocab_size=68, hidden_dropout=p, attention_dropout=p,
            position_embedding_type="rope", normalization="RMSNorm", swiglu=True,
            tie_word_embeddings=False, ffn_hidden_size=48, add_bias_linear=False,
        )
    ),
    "gpt-moe": lambda p, n: GPTForCausalLM(
        GPTConfig(
            num_layers=n, hidden_size=32, num_attention_heads=4, max_position_embeddings=40,
            vocab_size=68, hidden_dropout=p, attention_dropout=p, init_method_std=0.1,
            num_experts=4, moe_layer_freq=2,
        )
    ),
    "vit": lambda p, n: ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=n, num_attention_heads=4, intermediate_size=64,
            image_size=16, patch_size=4, hidden_dropout_prob=p, attention_probs_dropout_prob=p,
        )
    ),
    "mistral": lambda p, n: MistralForCausalLM(MistralConfig(**llama(n, sliding_window=9))),
    "custom": lambda p, n: CustomModel(n),
    "unplanned": lambda p, n: UnplannedModel(n),
    "gpt2-frozen": lambda p, n: _freeze(MODELS["gpt2"](p, n)),
    "shared-bias": lambda p, n: SharedBias(n),
}  # fmt: skip


def build_model(name: str, dropout: float = 0.0, layers: int = 2) -> nn.Module:
    """The same for the same name, with weights that hide no mistake."""
    torch.manual_seed(7)
    model = MODELS[name](dropout, layers)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:  # biases of zero and norms of one would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if "position_embeddings" in key or "cls_token" in key:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return model
