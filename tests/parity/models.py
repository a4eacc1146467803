"""Models by name, tiny and awkward: what a split, a shard or a stage could get wrong is in one.

A vocabulary that no number of processes divides, fewer key/value heads than processes, tied and
fused weights, norms on a share of the heads, a bias that all blocks share, frozen blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from peft import IA3Config, LoraConfig, PeftConfig
from torch import nn
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
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

from rapidformer.config import Settings
from rapidformer.data.collate import PadCollator
from rapidformer.models.adapters import apply_adapters
from rapidformer.models.gpt import GPTConfig, GPTForCausalLM
from rapidformer.models.towers import freeze_towers, list_left_out
from tests.parity.own_models import (
    PLAN,
    VOCABULARY,
    AddNeighbour,
    AveragingModel,
    CustomModel,
    MixingModel,
    OwnModel,
    PlainModel,
    SharedBias,
    UnplannedModel,
)
from tests.parity.seeing import SETTINGS as SEEING
from tests.parity.seeing import build_seeing

Rows = list[dict[str, Any]]
SAMPLES = 44
"""Not a multiple of any global batch: the last update is a smaller one, with fillers."""
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32,
}  # fmt: skip


GIVEN_PLANS = {"unplanned": PLAN}
"""Plans that ``compose`` is given for models that have none."""


def _bert(dropout: float, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": layers,
        "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 40,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
        "pad_token_id": 0, **more,
    }  # fmt: skip


def _gpt2(dropout: float, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 40,
        "bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLM",
        "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout, **more,
    }  # fmt: skip


def _t5(dropout: float, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": layers,
        "num_heads": 4, "dropout_rate": dropout, "decoder_start_token_id": 0, "pad_token_id": 0,
        **more,
    }  # fmt: skip


def _llama(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 40, "head_dim": 8, "pad_token_id": 0, **more,
    }  # fmt: skip


def _leak(model: Any) -> nn.Module:
    """A Hugging Face model whose feed-forward layers look at the neighbouring token."""
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(layer.mlp, AddNeighbour())
    return model  # type: ignore[no-any-return]


def _freeze(model: nn.Module) -> nn.Module:
    """As adapters would have it: the first stage learns nothing, the others a little."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.3.attn" in name or "h.2.mlp" in name)
    return model


def _adapt(model: nn.Module, *targets: str, left_out: Sequence[str] = (), **more: Any) -> nn.Module:
    """With LoRA whose B is not zero: otherwise A would have no gradient, and mistakes no effect."""
    config = LoraConfig(
        r=4, lora_alpha=2, target_modules=list(targets), init_lora_weights=False, **more
    )
    adapted = apply_adapters(model, config, left_out=left_out)
    config.base_model_name_or_path = "base"  # it can be built again, so no checkpoint holds it
    return adapted


def _prompt(model: nn.Module, kind: str) -> nn.Module:
    """With learned tokens before every row, or before the keys and values of every block."""
    config = PeftConfig.from_peft_type(peft_type=kind, num_virtual_tokens=3, task_type="CAUSAL_LM")
    return apply_adapters(model, config)


def _scale(model: nn.Module) -> nn.Module:
    """With learned factors (IA³) on outputs and on inputs."""
    config = IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"])
    return apply_adapters(model, config)


TARGETS = {
    "llama": (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head",
    ),
    "qwen3": ("q_proj", "v_proj", "down_proj"),
    "bert": ("query", "dense"),
    "t5": ("q", "v", "o", "wi", "wo"),
    "vit": ("q_proj", "o_proj", "fc1", "fc2"),
    "gpt": ("query", "output", "up"),
    "phi3": ("qkv_proj", "down_proj"),
    "deepseek": ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "mixtral": ("q_proj", "o_proj", "gate"),
    "gpt-oss": ("q_proj", "k_proj", "o_proj"),
    "gemma2": ("q_proj", "up_proj"),
}  # fmt: skip
"""The layers of each model that get an adapter: split by outputs and by inputs, or whole."""


def _build_adapted(name: str, *of: Any) -> nn.Module:
    *targets, dropout, layers = of
    return _adapt(MODELS[name](dropout, layers), *targets)


def _build_idle(kind: str, dropout: float, layers: int) -> nn.Module:
    """A model that also sees, as a user may pass it: its tower learns nothing from text."""
    return build_seeing(kind, layers)


def _build_frozen(kind: str, dropout: float, layers: int) -> nn.Module:
    """The same, as tasks build it."""
    model = build_seeing(kind, layers)
    freeze_towers(model, Settings())
    return model


def _build_seeing_adapted(kind: str, dropout: float, layers: int) -> nn.Module:
    model = build_seeing(kind, layers)
    left_out = list_left_out(model, Settings())
    return _adapt(model, "q_proj", "v_proj", "fc1", left_out=left_out)


MODELS: dict[str, Callable[[float, int], nn.Module]] = {  # of a dropout and a number of blocks
    "bert": lambda p, n: BertForSequenceClassification(BertConfig(**_bert(p, n))),
    "bert-mlm": lambda p, n: BertForMaskedLM(BertConfig(**_bert(p, n))),
    "roberta": lambda p, n: RobertaForMaskedLM(RobertaConfig(**{**_bert(p, n), "pad_token_id": 40,
        "max_position_embeddings": 100})),
    "gpt2": lambda p, n: GPT2LMHeadModel(GPT2Config(**_gpt2(p, n))),
    "t5": lambda p, n: T5ForConditionalGeneration(T5Config(**_t5(p, n))),
    # Their blocks return pairs: BLOOM's may be tuples of any length, DeBERTa's may not.
    "bloom": lambda p, n: BloomForCausalLM(BloomConfig(
        vocab_size=64, hidden_size=16, n_layer=n, n_head=2, hidden_dropout=p, attention_dropout=p)),
    "deberta": lambda p, n: DebertaV2ForMaskedLM(DebertaV2Config(
        **_bert(p, n, **SMALL), relative_attention=True, pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm", pooler_dropout=p)),
    "llama": lambda p, n: LlamaForCausalLM(LlamaConfig(**_llama(n))),
    "qwen3": lambda p, n: Qwen3ForCausalLM(Qwen3Config(**_llama(n, tie_word_embeddings=True))),
    "gemma2": lambda p, n: Gemma2ForCausalLM(
        Gemma2Config(**_llama(n, final_logit_softcapping=30.0, attn_implementation="eager"))
    ),
    # The last block has larger heads than the others, and all see far back but the first ones.
    "gemma4": lambda p, n: Gemma4ForCausalLM(
        Gemma4TextConfig(
            **_llama(n, global_head_dim=16, sliding_window=6, hidden_size_per_layer_input=4),
            vocab_size_per_layer_input=VOCABULARY,
            layer_types=["sliding_attention"] * (n - 1) + ["full_attention"],
        )
    ),
    "mixtral": lambda p, n: MixtralForCausalLM(MixtralConfig(**_llama(n, num_local_experts=4))),
    # Learnt activations, whose weights work on a share of the width.
    "apertus": lambda p, n: ApertusForCausalLM(ApertusConfig(**_llama(n))),
    # A key's turned part is one for all heads; the first block's feed-forward layer is dense.
    "deepseek": lambda p, n: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **_llama(n, num_key_value_heads=4, head_dim=4), q_lora_rank=16, kv_lora_rank=16,
            qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, n_group=1,
            topk_group=1, first_k_dense_replace=1,
        )
    ),
    # A number per head beside the layers.
    "gpt-oss": lambda p, n: GptOssForCausalLM(
        GptOssConfig(**_llama(n, num_local_experts=4, num_experts_per_tok=2, sliding_window=8))
    ),
    "phi3": lambda p, n: Phi3ForCausalLM(Phi3Config(**_llama(n))),
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
    "mistral": lambda p, n: MistralForCausalLM(MistralConfig(**_llama(n, sliding_window=9))),
    # Ranks that share sequences have parts that begin inside of this window.
    "mistral-narrow": lambda p, n: MistralForCausalLM(MistralConfig(**_llama(n, sliding_window=5))),
    "leaky": lambda p, n: _leak(MODELS["llama"](p, n)),
    "own": lambda p, n: OwnModel(),
    "mixing": lambda p, n: MixingModel(),
    "averaging": lambda p, n: AveragingModel(),
    "custom": lambda p, n: CustomModel(n),
    "unplanned": lambda p, n: UnplannedModel(n),
    "gpt2-frozen": lambda p, n: _freeze(MODELS["gpt2"](p, n)),
    "gpt2-lora": lambda p, n: _adapt(MODELS["gpt2"](p, n), "c_attn", "c_proj", "c_fc", "wte"),
    "experts-lora": lambda p, n: _adapt(
        MODELS["mixtral"](p, n), "q_proj", target_parameters=["experts.gate_up_proj"]
    ),
    "gpt2-prompt": lambda p, n: _prompt(MODELS["gpt2"](p, n), "PROMPT_TUNING"),
    "gpt2-prefix": lambda p, n: _prompt(MODELS["gpt2"](p, n), "PREFIX_TUNING"),
    "gpt2-ia3": lambda p, n: _scale(MODELS["gpt2"](p, n)),
    "gpt2-dora": lambda p, n: _adapt(MODELS["gpt2"](p, n), "c_attn", "c_proj", use_dora=True),
    **{
        f"{name}-lora": functools.partial(_build_adapted, name, *targets)
        for name, targets in TARGETS.items()
    },
    "shared-bias": lambda p, n: SharedBias(n),
    "small-bert": lambda p, n: BertForSequenceClassification(BertConfig(**_bert(p, n, **SMALL))),
    "small-bert-mlm": lambda p, n: BertForMaskedLM(BertConfig(**_bert(p, n, **SMALL))),
    "small-gpt2": lambda p, n: GPT2LMHeadModel(
        GPT2Config(**_gpt2(p, n, vocab_size=64, n_embd=16, n_head=2, n_positions=32))
    ),
    "small-gpt2-lora": lambda p, n: _adapt(MODELS["small-gpt2"](p, n), "c_attn", "c_fc"),
    "small-t5": lambda p, n: T5ForConditionalGeneration(
        T5Config(**_t5(p, n, vocab_size=64, d_model=16, d_ff=32, num_heads=2))
    ),
    "small-llama": lambda p, n: LlamaForCausalLM(
        LlamaConfig(**_llama(n, num_key_value_heads=1, **SMALL))
    ),
    "small-plain": lambda p, n: PlainModel(p, n),
    **{f"idle-{kind}": functools.partial(_build_idle, kind) for kind in SEEING},
    **{kind: functools.partial(_build_frozen, kind) for kind in SEEING},
    **{f"{kind}-lora": functools.partial(_build_seeing_adapted, kind) for kind in SEEING},
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


def sharpen(model: nn.Module) -> None:
    """Make one answer much likelier than the others: round-off must not choose between two."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)


def build_rows(name: str, count: int = SAMPLES) -> Rows:
    """Rows of very unequal lengths; some tokens without a label. Images for a ViT."""
    random = np.random.default_rng(3)
    name = name.removesuffix("-lora")
    if name == "vit":
        return [_draw_image(random) for _ in range(count)]
    return [_draw_text(random, is_classified=name.endswith("bert")) for _ in range(count)]


def _draw_text(random: np.random.Generator, *, is_classified: bool) -> dict[str, Any]:
    ids = random.integers(1, 64, int(random.integers(3, 24))).tolist()
    if is_classified:
        return {"input_ids": ids, "labels": int(random.integers(0, 2))}
    return {"input_ids": ids, "labels": [i if random.random() < 0.6 else -100 for i in ids]}


def _draw_image(random: np.random.Generator) -> dict[str, Any]:
    pixels = random.normal(size=(3, 16, 16)).astype(np.float32)
    return {"pixel_values": torch.from_numpy(pixels), "labels": int(random.integers(0, 2))}


def collate(rows: Rows) -> dict[str, torch.Tensor]:
    if "pixel_values" in rows[0]:
        return {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
    return PadCollator()(rows)
