"""The Triton kernel of the fused loss against the same in plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from rapidformer.accel.fused_loss.chunked import Recipe, differentiate, sum_losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [37, 8192, 50257, 50304])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_of_a_chunk(dtype: torch.dtype, width: int, smoothing: float) -> None:
    from rapidformer.accel.fused_loss.kernel import differentiate_in_place

    torch.manual_seed(0)
    logits = torch.randn(65, width, device="cuda").mul_(4).to(dtype)
    labels = torch.randint(width, (65,), device="cuda")
    labels[::5] = -100
    loss, gradient = differentiate(logits, labels, -100, smoothing)
    found, replaced = differentiate_in_place(logits, labels, -100, smoothing)
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(replaced, gradient)
    assert replaced.data_ptr() == logits.data_ptr()


def test_masked_words_and_wrong_labels() -> None:
    from rapidformer.accel.fused_loss.kernel import differentiate_in_place

    logits = torch.randn(4, 20000, device="cuda")
    logits[:, :16000] = -math.inf  # two whole blocks
    labels = torch.tensor([17000, 18000, 19000, 19999], device="cuda")
    expected, _ = differentiate(logits, labels, -100, 0.0)
    found, gradient = differentiate_in_place(logits.clone(), labels, -100, 0.0)
    torch.testing.assert_close(found, expected)
    assert bool(gradient.isfinite().all())
    labels[2] = 20000
    assert bool(differentiate_in_place(logits, labels, -100, 0.0)[0].isnan())


def test_offsets_beyond_32_bits() -> None:
    from rapidformer.accel.fused_loss.kernel import differentiate_in_place

    logits = torch.zeros(2**14 + 512, 2**17, device="cuda", dtype=torch.bfloat16)
    logits[-4:].normal_()
    labels = torch.full((len(logits),), -100, device="cuda")
    labels[-4:] = torch.tensor([0, 7, 2**17 - 1, 99], device="cuda")
    expected = differentiate(logits[-4:], labels[-4:], -100, 0.0)
    found, replaced = differentiate_in_place(logits, labels, -100, 0.0)
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(replaced[-4:], expected[1])
    assert not bool(replaced[0].any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_gradients_against_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3000, 256, device="cuda")
    weight = torch.randn(40000, 256, device="cuda").mul_(0.05)
    labels = torch.randint(40000, (3000,), device="cuda")
    found = []
    for kind in (torch.float32, dtype):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if kind == torch.float32:
            logits = functional.linear(*leaves)
            loss = functional.cross_entropy(logits, labels, reduction="sum")
        else:
            with torch.autocast("cuda", kind):
                loss = sum_losses(leaves[0].to(kind), leaves[1], None, labels, Recipe())
        loss.backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for reference, mine in zip(*found, strict=True):
        difference = (mine - reference).norm() / reference.norm()
        assert difference < 5e-3
