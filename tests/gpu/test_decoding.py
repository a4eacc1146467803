"""Generating by a CUDA graph: the same tokens as transformers alone, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from rapidformer.accel.cuda_graph.capture import CudaCapture
from rapidformer.accel.cuda_graph.decoding import Decoding, replaying_tokens
from rapidformer.overlay import put_fact
from tests.accel.test_decoding import SIZES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("more", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_the_same_tokens(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device).eval()
    ids = torch.randint(4, 60, (3, 7), device=device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    recorded: list[int] = []  # not the graphs themselves: one must be able to end
    record = CudaCapture.record
    monkeypatch.setattr(CudaCapture, "record", lambda *given: recorded.append(1) or record(*given))
    found = []
    for is_on in (False, True):
        if is_on:
            put_fact(model, Decoding(CudaCapture(device)))
        for prompt in (ids, ids[:, 1:]):
            torch.manual_seed(1)
            config = GenerationConfig(max_new_tokens=20, **more)
            with replaying_tokens(model, config):
                given: Any = {"attention_mask": mask[:, -prompt.shape[1] :]}
                found.append(model.generate(prompt, generation_config=config, **given))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert len(recorded) == 2
