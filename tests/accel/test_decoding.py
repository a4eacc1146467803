"""Generating by a graph, without a GPU: a stand-in runs the step again instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from rapidformer.accel.cuda_graph.decoding import Decoding, replaying_tokens
from rapidformer.compat.torch_modules import get_compiled_call
from rapidformer.compat.transformers_models import takes_static_cache
from rapidformer.overlay import put_fact


class Later:
    """Recording runs nothing; a replay runs the function and fills its outputs."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def warm_up(self, function: Callable[[], Any], *, forbids_reads: bool) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> Any:
        self.recorded += 1
        outputs = CausalLMOutputWithPast(logits=torch.zeros(()))

        def replay() -> None:
            self.replayed += 1
            outputs["logits"] = function().logits

        return outputs, replay


SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 32, "pad_token_id": 0, "eos_token_id": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "is_replayed"),
    [
        ({}, True),
        ({"do_sample": True, "temperature": 2.0}, True),
        ({"num_beams": 2}, False),
        ({"output_hidden_states": True}, False),
    ],
    ids=["greedy", "sampled", "beams", "hidden states"],
)
def test_the_same_tokens(more: dict[str, Any], is_replayed: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    ids = torch.randint(4, 60, (3, 7))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :2] = 0, 0
    found, capture = [], Later()
    for is_on in (False, True):
        if is_on:
            put_fact(model, Decoding(capture))  # type: ignore[arg-type]
        for prompt in (ids, ids[:, 2:]):
            torch.manual_seed(1)
            config = GenerationConfig(max_new_tokens=9, **more)
            with replaying_tokens(model, config):
                given: Any = {"attention_mask": mask[:, -prompt.shape[1] :]}
                found.append(model.generate(prompt, generation_config=config, **given))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert (capture.recorded == 2, capture.replayed > 8) == (is_replayed, is_replayed)
    assert get_compiled_call(model) is None


def test_models_whose_cache_is_not_on_the_device_alone() -> None:
    sliding = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))
    for model, is_taken in ((LlamaForCausalLM(LlamaConfig(**SIZES)), True), (sliding, False)):
        assert takes_static_cache(model, type(model)) == is_taken


def test_keys_and_values_of_autocast_share_a_cache() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    put_fact(model, Decoding(Later()))  # type: ignore[arg-type]
    found = []
    for cached in (False, True):
        config = GenerationConfig(max_new_tokens=5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if not cached:
                given: Any = {"generation_config": config}
                found.append(model.generate(torch.arange(4, 9)[None], **given))
                continue
            with replaying_tokens(model, config):
                found.append(model.generate(torch.arange(4, 9)[None], generation_config=config))
    assert torch.equal(*found)
