"""Who says how a model may be split, and what is said where nobody does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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


def test_a_model_without_a_plan_says_what_to_write() -> None:
    with pytest.raises(ModelError, match="no plan says how Sequential may be split") as error:
        plan_of(nn.Sequential(nn.Linear(2, 2)))
    assert "rapidformer_plan()" in str(error.value)
    assert "--zero-3-memory-optimization" in str(error.value)


def test_styles_and_keys_that_are_not_known_are_named() -> None:
    with pytest.raises(ModelError, match=r"columns \(layers.0\)"):
        plan_of(Own({"tensor": {"layers.0": "columns"}}))
    with pytest.raises(
        ModelError, match=r"unknown keys: tensors\. Known are after, before, blocks, divided"
    ):
        plan_of(Own({"tensors": {}}))


def test_the_callers_plan_comes_before_all_others() -> None:
    model = Own({"blocks": "layers", "tensor": {"layers.*": "colwise_gather_output"}})
    given = {"tensor": {"layers.0": "rowwise_split_input"}}
    plan = find_plan(model, given)
    assert plan.blocks == ("layers.0", "layers.1"), "what it does not say, the model does"
    tensor_plan = find_tensor_plan(model, plan)
    assert tensor_plan.styles == {"layers.0": "rowwise_split_input"}
    assert tensor_plan.source == "the plan given to compose()"
    llama = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=16))
    styles = find_tensor_plan(
        llama, find_plan(llama, {"tensor": {"model.layers.*.mlp.up_proj": "colwise_gather_output"}})
    ).styles
    assert styles["model.layers.0.mlp.up_proj"] == "colwise_gather_output"
    assert "model.layers.0.mlp.gate_proj" not in styles


def test_a_slip_in_a_plan_is_named() -> None:
    with pytest.raises(
        ModelError, match=r"rapidformer_plan\(\): nothing in Own has the name layer"
    ):
        plan_of(Own({"tensor": {"layers.*": "colwise", "layer.*": "colwise"}}))
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(
        ModelError, match=r"the plan given to compose\(\): nothing .* 1 \('divided'"
    ):
        find_plan(model, {"tensor": {"0": "colwise"}, "divided": {"1": ["heads"]}})
    with pytest.raises(ModelError, match=r"the plan given to compose\(\) has unknown keys: block"):
        find_plan(model, {"block": "0"})


def test_a_plan_that_names_the_head_alone_is_none() -> None:
    """The layers would all stay whole: the switch would promise memory that it does not save."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=16))
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    with pytest.raises(ModelError, match="no plan says how LlamaForCausalLM may be split"):
        plan_of(model)
    model._tp_plan = {"model.layers.*.mlp.down_proj.weight": "rowwise"}
    with pytest.raises(ModelError, match="no plan says how LlamaForCausalLM may be split"):
        plan_of(model)


def test_a_parameter_may_be_named_where_it_has_one_number_per_head() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=16))
    attention: Any = model.model.layers[0].self_attn
    attention.sinks = nn.Parameter(torch.zeros(2))
    own = {"model.layers.*.self_attn.sinks": "colwise", "model.layers.*.mlp.up_proj": "colwise"}
    plan = find_tensor_plan(model, find_plan(model, {"tensor": own}))
    assert plan.parameters == {"model.layers.0.self_attn.sinks"}
    own = {"model.layers.*.mlp.up_proj.weight": "colwise"}
    with pytest.raises(ModelError, match=r"up_proj\.weight of shape \[16, 8\] as colwise: only"):
        find_tensor_plan(model, find_plan(model, {"tensor": own}))


def test_experts_stay_whole() -> None:
    config = MixtralConfig(**SMALL, intermediate_size=16, num_key_value_heads=2)
    plan = plan_of(MixtralForCausalLM(config))
    assert "model.layers.0.self_attn.o_proj" in plan.styles
    assert not [name for name in plan.styles if "experts" in name]
