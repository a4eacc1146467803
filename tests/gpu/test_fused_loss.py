"""The Triton kernel of the fused loss against the same in plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from rapidformer.accel.fused_loss.chunked import Recipe, compute_losses
from rapidformer.accel.fused_loss.divergence import Divergence, Teacher
from rapidformer.accel.fused_loss.scoring import score

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [37, 8192, 50257, 50304])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_of_a_chunk(dtype: torch.dtype, width: int, smoothing: float) -> None:
    from rapidformer.accel.fused_loss.kernel import score_in_place

    torch.manual_seed(0)
    logits = torch.randn(65, width, device="cuda").mul_(4).to(dtype)
    labels = torch.randint(width, (65,), device="cuda")
    labels[::5] = -100
    expected = score(logits, labels, -100, smoothing, has_statistics=True)
    only = score_in_place(logits, labels, -100, smoothing, has_gradient=False)
    assert only.gradient is None and only.statistics is None
    found = score_in_place(logits, labels, -100, smoothing, has_statistics=True)
    assert torch.equal(found.losses, only.losses)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.gradient, expected.gradient)
    torch.testing.assert_close(found.statistics, expected.statistics, rtol=1e-4, atol=1e-4)
    assert found.gradient is not None and found.gradient.data_ptr() == logits.data_ptr()


def test_masked_words_and_wrong_labels() -> None:
    from rapidformer.accel.fused_loss.kernel import score_in_place

    logits = torch.randn(4, 20000, device="cuda")
    logits[:, :16000] = -math.inf  # two whole blocks
    labels = torch.tensor([17000, 18000, 19000, 19999], device="cuda")
    expected = score(logits, labels, -100, 0.0, has_statistics=True)
    found = score_in_place(logits.clone(), labels, -100, 0.0, has_statistics=True)
    torch.testing.assert_close(found.losses, expected.losses)
    torch.testing.assert_close(found.statistics, expected.statistics)
    assert found.gradient is not None and bool(found.gradient.isfinite().all())
    labels[2] = 20000
    assert score_in_place(logits, labels, -100, 0.0).losses.isnan().tolist() == [0, 0, 1, 0]


def test_offsets_beyond_32_bits() -> None:
    from rapidformer.accel.fused_loss.kernel import score_in_place

    logits = torch.zeros(2**14 + 512, 2**17, device="cuda", dtype=torch.bfloat16)
    logits[-4:].normal_()
    labels = torch.full((len(logits),), -100, device="cuda")
    labels[-4:] = torch.tensor([0, 7, 2**17 - 1, 99], device="cuda")
    expected = score(logits[-4:], labels[-4:], -100, 0.0)
    found = score_in_place(logits, labels, -100, 0.0)
    torch.testing.assert_close(found.losses[-4:], expected.losses, rtol=1e-5, atol=0)
    assert found.gradient is not None
    torch.testing.assert_close(found.gradient[-4:], expected.gradient)
    assert not bool(found.gradient[0].any()) and not bool(found.losses[:-4].any())


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
                loss = compute_losses(leaves[0].to(kind), leaves[1], None, labels, Recipe()).values
        loss.backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for reference, mine in zip(*found, strict=True):
        difference = (mine - reference).norm() / reference.norm()
        assert difference < 5e-3


@pytest.mark.parametrize("has_head", [True, False])
def test_losses_and_divergences_of_each_row_without_waiting_for_the_host(has_head: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3000, 256, device="cuda")
    weight = torch.randn(40000, 256, device="cuda").mul_(0.05)
    other = torch.randn(40000, 256, device="cuda").mul_(0.05)
    labels = torch.randint(40000, (3000,), device="cuda")
    labels[::3] = -100
    factors = torch.randn(3000, device="cuda")
    is_kept = labels != -100

    def compute(kind: torch.dtype, recipe: Recipe) -> list[torch.Tensor]:
        leaves = [each.to(kind, copy=True).requires_grad_() for each in (hidden, weight)]
        rows, table = (leaves[0], leaves[1]) if has_head else (functional.linear(*leaves), None)
        teacher = None
        if recipe.divergence is not None:
            teacher = Teacher(hidden.to(kind), other.to(kind))
        losses, statistics = compute_losses(rows, table, None, labels, recipe, teacher)
        (losses * factors if recipe.is_by_row else losses).sum().backward()
        assert statistics is not None
        return [losses.detach(), statistics, *(leaf.grad.float() for leaf in leaves)]

    recipes = [
        Recipe(is_by_row=True, has_statistics=True),
        Recipe(is_by_row=True, has_statistics=True, steps=(lambda x: 3 * torch.tanh(x / 3),)),
        Recipe(divergence=Divergence(0.3, 1.5, 0.7, 0.3)),
    ]
    for recipe in recipes:
        exact = compute(torch.float32, recipe)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = compute(torch.bfloat16, recipe)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for number, (mine, reference) in enumerate(zip(found, exact, strict=True)):
            if recipe.is_by_row and number == 1:  # of two nearly equal words, either may be best
                mine, reference = mine[:2], reference[:2]
            assert (mine - reference).norm() / reference.norm() < 1e-2
    plain = functional.linear(hidden, weight)
    expected = functional.cross_entropy(plain, labels, reduction="none")
    torch.testing.assert_close(compute(torch.float32, recipes[0])[0], expected)
    assert bool((expected[~is_kept] == 0).all())
