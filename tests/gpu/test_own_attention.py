"""Attention in a model's own code on a GPU: fused kernels give what its own code gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rapidformer.accel.attention.own_code.modules import apply_own_code
from tests.accel.test_eager_attention import MODELS, build, check, make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LIMITS = {None: 0.0, torch.bfloat16: 0.005, torch.float16: 0.001}
"""An error, relative to the largest number, that is not looked into."""
CASES = [
    (name, precision)
    for name in MODELS
    for precision in LIMITS
    if (name, precision) != ("longt5", torch.float16)  # its own code gives NaN
]


def run(model: Any, batch: dict[str, Tensor], precision: torch.dtype | None) -> dict[str, Tensor]:
    """Hidden states of real tokens, and all gradients; losses in fp16 are scaled."""
    model.zero_grad()
    with torch.autocast("cuda", precision or torch.bfloat16, enabled=precision is not None):
        hidden = model(**batch).last_hidden_state.float()
    real = batch["attention_mask"][..., None] if "decoder_input_ids" not in batch else 1
    scale = 1024.0 if precision is torch.float16 else 1.0
    ((hidden * real).cos().sum() * scale).backward()
    found = {name: p.grad / scale for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": (hidden * real).detach(), **found}


def measure(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """How far the worst is from what is expected, relative to the largest number of all."""
    scale = max(float(value.abs().max()) for value in expected.values())
    assert list(found) == list(expected)
    differences = [(found[name] - value).abs().max() for name, value in expected.items()]
    return float(torch.stack(differences).max()) / scale


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_its_own_results(name: str, precision: torch.dtype | None) -> None:
    """In 16 bits they are at most twice as far from those in fp32."""
    model = build(name).cuda()
    batches = [
        {key: value.cuda() for key, value in make_batch(name, side).items()}
        for side in ("none", "right", "left")
    ]
    exact = [run(model, batch, None) for batch in batches]
    usual = [run(model, batch, precision) for batch in batches]
    assert apply_own_code(model) >= 1
    for batch, truth, theirs in zip(batches, exact, usual, strict=True):
        found = run(model, batch, precision)
        if precision is None:
            check(found, truth, 1e-4)
        else:
            assert measure(found, truth) <= max(2 * measure(theirs, truth), LIMITS[precision])
