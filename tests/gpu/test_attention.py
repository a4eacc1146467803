"""Kernels of attention on a GPU: T5's bias reaches a fused one, and cuDNN comes first if asked."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from rapidformer.accel.attention.kernel_order import apply_bias_layout
from rapidformer.engine import RapidformerEngine
from tests.parity.models import build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
IDS = torch.arange(64).reshape(4, 16) % 60 + 1


def test_t5_trains_without_the_unfused_kernel() -> None:
    model = build_model("small-t5", 0.0, layers=2).train().cuda()
    apply_bias_layout(model)
    fused = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(fused), torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=IDS.cuda(), labels=IDS.cuda())["loss"]
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    bias = [g for name, g in gradients.items() if "relative_attention_bias" in name]
    assert len(bias) == 2
    assert all(g is not None and bool(g.abs().sum() > 0) for g in bias)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="cuDNN comes first from Hopper on",
)
def test_cudnn_comes_first_for_multiples_of_64() -> None:
    engine = RapidformerEngine(args=["--mixed-precision", "bf16", "--log-level", "error"])
    model = build_model("llama", 0.0, layers=2)
    engine.model.compose_for_evaluation(model)
    for ids, is_first in ((IDS.repeat(1, 4), True), (IDS, False)):
        with profile(activities=[ProfilerActivity.CPU]) as profiled, torch.no_grad():
            model(input_ids=ids.to(engine.device), use_cache=False)
        names = [event.key for event in profiled.key_averages()]
        assert any("cudnn_attention" in name for name in names) is is_first
    engine.close()
