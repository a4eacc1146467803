"""Experts as grouped products: transformers' results, 16 bits under autocast, one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.aria import modeling_aria

from rapidformer.accel.compile.compilation import apply_compile
from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.grouped_experts import apply_grouped_experts, extend_own_experts, multiply
from rapidformer.models.plan import find_plan
from rapidformer.overlay import get_fact

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 4,
    "num_experts_per_tok": 2, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "layer_types": ["full_attention"],
}  # fmt: skip


# gpt_oss: transposed weights, biases, and a gate of its own.
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_the_results_of_transformers(kind: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL, rope_parameters={"rope_type": "default"})
    model = AutoModelForCausalLM.from_config(config)
    expected = run(model)
    apply_grouped_experts(model, torch.device("cpu"))
    for mine, theirs in zip(run(model), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["jetmoe", "aria_text"])
def test_models_with_experts_of_their_own(kind: str) -> None:
    """Whatever the split of tokens, one graph."""
    torch.manual_seed(0)
    options = {"moe_num_experts": 4, "moe_topk": 2, "kv_channels": 8, **SMALL}
    if kind == "aria_text":
        options["rope_parameters"] = {"rope_type": "default"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    expected = [run(model, first) for first in (3, 9)]
    if kind == "aria_text" and not hasattr(modeling_aria, "AriaGroupedExpertsGemm"):
        pytest.skip("from 5.22 on, Aria has the experts of other models")
    assert extend_own_experts(model) > 0
    apply_compile(model, find_plan(model), backend="aot_eager")
    for first, theirs in zip((3, 9), expected, strict=True):
        for mine, usual in zip(run(model, first), theirs, strict=True):
            torch.testing.assert_close(mine, usual, rtol=1e-5, atol=1e-6)
    compiled = get_fact(model, CompiledBlocks)
    assert (compiled.graphs, compiled.recompilations) == (1, 0)


def run(model: Any, first: int = 3) -> list[torch.Tensor]:
    model.zero_grad()
    ids = torch.arange(first, first + 20).view(2, 10)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_products_in_fp32_are_compiled_without_a_break() -> None:
    rows, weights = torch.randn(20, 16), torch.randn(4, 8, 16)
    ends = torch.tensor([5, 5, 12, 20], dtype=torch.int32)  # the second expert has no rows

    def differentiate(function: Any) -> list[torch.Tensor]:
        inputs = [rows.clone().requires_grad_(), weights.clone().requires_grad_()]
        output = function(inputs[0], inputs[1].transpose(1, 2), ends)
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    compiled = torch.compile(multiply, backend="aot_eager", fullgraph=True)
    parts = zip(rows.split([5, 0, 7, 8]), weights, strict=True)
    torch.testing.assert_close(
        multiply(rows, weights.transpose(1, 2), ends), torch.cat([a @ b.T for a, b in parts])
    )
    for mine, plain in zip(differentiate(compiled), differentiate(multiply), strict=True):
        torch.testing.assert_close(mine, plain)


def test_autocast_applies_to_experts() -> None:
    rows, weights = torch.randn(4, 8), torch.randn(2, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = multiply(rows, weights, torch.tensor([1, 4], dtype=torch.int32))
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product[:1].float(), rows[:1] @ weights[0], rtol=0.05, atol=0.05)
