"""Hashed dropout on a GPU, in code that inductor generates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.compile.hashed_dropout import drop, hash_dropout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_both_passes_drop_the_same_elements_each_with_the_same_probability() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Dropout(0.1))
    CompiledBlocks("inductor", rewrites=[hash_dropout]).add(layer)
    rows = torch.ones(4096, 768, device="cuda", requires_grad=True)
    first, second = layer(rows), layer(rows)
    (gradient,) = torch.autograd.grad(first.sum(), rows)
    assert torch.equal(gradient, first)
    is_kept, again = (first != 0).double(), (second != 0).double()
    deviation = (0.1 * 0.9 / rows.numel()) ** 0.5
    assert (is_kept.mean() - 0.9).abs() < 5 * deviation
    assert (is_kept.mean(0) - 0.9).abs().max() < 5.5 * deviation * 768**0.5
    together = ((is_kept - 0.9) * (again - 0.9)).mean() / 0.09
    assert together.abs() < 5 / rows.numel() ** 0.5


def test_a_gpu_drops_what_a_cpu_drops_with_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = torch.tensor([1234567890123456789])
    monkeypatch.setattr(torch, "randint", lambda *_, device, **__: seed.to(device))
    found = drop(torch.ones(64, 96, device="cuda"), 0.3)
    assert torch.equal(found.cpu(), drop(torch.ones(64, 96), 0.3))


def test_generated_code_keeps_nan_in_both_passes() -> None:
    torch._dynamo.reset()
    layer = nn.Sequential(nn.Dropout(0.5))
    CompiledBlocks("inductor", rewrites=[hash_dropout]).add(layer)
    rows = torch.full((64, 64), torch.nan, device="cuda", requires_grad=True)
    dropped = layer(rows)
    dropped.backward(torch.full_like(rows, torch.nan))
    assert rows.grad is not None and rows.grad.isnan().all()
    assert dropped.isnan().all()
