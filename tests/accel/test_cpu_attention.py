"""Attention with dropout on a CPU: what a plain softmax gives for each row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rapidformer.accel.unpad import cpu_attention, kernels
from rapidformer.accel.unpad.dropout import draw_factors

from .test_unpad_kernels import make_inputs, make_mask

LENGTHS = [5, 1, 7, 3]
OTHERS = [4, 6, 1, 9]
"""The rows of keys of a decoder that attends to an encoder."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: cpu_attention.Lengths, *, is_causal: bool
) -> Tensor:
    """Row by row, as a reader would write it; the same weights are dropped."""
    key, value = (each.repeat_interleave(2, 0) for each in (key, value))
    rows = zip(query.split(lengths[0], 1), key.split(lengths[1], 1), strict=True)
    scores = [0.3 * its_query @ its_key.mT for its_query, its_key in rows]
    if is_causal:
        scores = [each + torch.full_like(each, -torch.inf).triu(1) for each in scores]
    count = sum(each.numel() for each in scores)
    kept = draw_factors(torch.ones(count), 0.4).split([each.numel() for each in scores])
    attended = [
        (its_kept.view(each.shape) * each.softmax(-1)) @ its_value
        for each, its_kept, its_value in zip(scores, kept, value.split(lengths[1], 1), strict=True)
    ]
    return torch.cat(attended, 1).transpose(0, 1)


@pytest.mark.parametrize("has_mkl", [True, False])
@pytest.mark.parametrize(
    ("kind", "others"), [("causal", LENGTHS), ("full", LENGTHS), ("full", OTHERS)]
)
def test_values_and_gradients(
    kind: str, others: list[int], has_mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    query, *_ = make_inputs(sum(LENGTHS))
    _, key, value = make_inputs(sum(others))
    inputs = [each.squeeze(0).detach().requires_grad_() for each in (query, key, value)]
    direction, results = torch.randn(sum(LENGTHS), 4, 8), []
    for compute in (attend, cpu_attention.attend):
        torch.manual_seed(0)
        options = {} if compute is attend else {"dropout": 0.4, "scale": 0.3}
        found = compute(*inputs, (LENGTHS, others), is_causal=kind == "causal", **options)
        gradients = torch.autograd.grad((found * direction).sum(), inputs)
        results.append((found, *gradients, torch.rand(1)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_rows_without_queries_or_keys() -> None:
    query, key, value = (each.squeeze(0) for each in make_inputs(8))
    found = cpu_attention.attend(
        query, key, value, ([5, 0, 3], [3, 5, 0]), 0.4, None, is_causal=False
    )
    of_key, of_value = torch.autograd.grad(found.sum(), (key, value))
    assert found[:5].any() and not found[5:].any()
    assert of_value[:, :3].any() and not of_value[:, 3:].any() and not of_key[:, 3:].any()


@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_of_gradients(is_causal: bool) -> None:
    inputs = [each.squeeze(0).double().detach().requires_grad_() for each in make_inputs(6)]

    def compute(*tensors: Tensor) -> Tensor:
        torch.manual_seed(0)
        return cpu_attention.attend(
            *tensors, ([2, 1, 3], [2, 1, 3]), dropout=0.4, scale=None, is_causal=is_causal
        )

    assert torch.autograd.gradcheck(compute, inputs)
    assert torch.autograd.gradgradcheck(compute, inputs)


@pytest.mark.parametrize("is_cast", [True, False])
def test_16_bits_are_left_to_torch(is_cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of ours would mix fp32 and 16 bits."""
    monkeypatch.delattr(cpu_attention, "attend")
    inputs = make_inputs(16, torch.float32 if is_cast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        found = kernels.attend(*inputs, make_mask("full"), dropout=0.4)
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16
