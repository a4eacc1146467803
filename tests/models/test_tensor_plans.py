"""Who says how a model may be split, and what is said where nobody does."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from rapidformer.errors import ModelError
from rapidformer.models.plan import find_plan
from rapidformer.models.tensor_plans import TensorPlan, find_tensor_plan

SMALL = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def plan_of(model: nn.Module) -> TensorPlan:
    return find_tensor_plan(model, find_plan(model))


class Own(nn.Module):
    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.plan = plan

    def rapidformer_plan(self) -> dict[str, Any]:
        return self.plan


def test_the_models_own_plan_comes_first() -> None:
    plan = plan_of(Own({"blocks": "layers", "tensor": {"layers.*": "colwise_gather_output"}}))
    assert plan.styles == dict.fromkeys(("layers.0", "layers.1"), "colwise_gather_output")
    assert plan.source == "the model's rapidformer_plan()"


def test_transformers_words_with_embedding_and_head_added() -> None:
    plan = plan_of(LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=16)))
    assert plan.styles["model.layers.0.self_attn.q_proj"] == "colwise"
    assert plan.styles["model.layers.0.self_attn.k_proj"] == "key_value"
    assert plan.styles["model.layers.0.mlp.down_proj"] == "rowwise"
    assert plan.styles["model.embed_tokens"] == "embedding_rowwise"
    assert plan.styles["lm_head"] == "colwise_gather_output"
    assert plan.sequence_problem == ""


def test_our_table_finds_the_base_model_inside_any_head() -> None:
    bert = plan_of(BertForMaskedLM(BertConfig(**SMALL, intermediate_size=16)))
    assert bert.styles["bert.encoder.layer.0.attention.output.dense"] == "rowwise"
    assert bert.styles["cls.predictions.decoder"] == "colwise_gather_output"
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2)
    gpt2 = plan_of(GPT2ForSequenceClassification(config))
    assert gpt2.styles["transformer.h.0.attn.c_attn"] == "fused_qkv"
    assert gpt2.divided == {"transformer.h.0.attn": ("split_size",)}
    assert "score" not in gpt2.styles


def test_a_model_without_a_plan_is_told_what_to_write() -> None:
    with pytest.raises(ModelError, match="nothing says how Sequential may be split") as error:
        plan_of(nn.Sequential(nn.Linear(2, 2)))
    assert "rapidformer_plan()" in str(error.value)
    assert "--zero-3-memory-optimization" in str(error.value)


def test_styles_and_keys_that_are_not_known_are_named() -> None:
    with pytest.raises(ModelError, match=r"columns \(layers.0\)"):
        plan_of(Own({"tensor": {"layers.0": "columns"}}))
    with pytest.raises(ModelError, match=r"unknown keys: tensors\. Known are blocks, divided"):
        plan_of(Own({"tensors": {}}))


def test_experts_stay_whole() -> None:
    config = MixtralConfig(**SMALL, intermediate_size=16, num_key_value_heads=2)
    plan = plan_of(MixtralForCausalLM(config))
    assert "model.layers.0.self_attn.o_proj" in plan.styles
    assert not [name for name in plan.styles if "experts" in name]
