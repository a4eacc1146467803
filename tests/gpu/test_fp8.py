"""``--fp8`` and Adam's moments in bf16 on a GPU, compiled, against bf16 and fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from rapidformer.accel import fp8
from rapidformer.optim.bf16_adamw import Bf16AdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="this GPU has no fp8",
)


def differentiate(linear: object, rows: int) -> list[Tensor]:
    """Output and gradients of a layer with 1,024 inputs and 2,048 outputs."""
    generator = torch.Generator("cuda").manual_seed(1)
    x, weight, gradient = (
        torch.randn(size, device="cuda", generator=generator)
        for size in ((rows, 1024), (2048, 1024), (rows, 2048))
    )
    x.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        output = linear(x, weight, None)  # type: ignore[operator]
    gradients = torch.autograd.grad(output, (x, weight), gradient.to(output.dtype))
    return [output.detach(), *gradients]


@needs_fp8
@pytest.mark.parametrize("rows", [64, 50])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_products_are_close_to_those_of_bf16(rows: int, is_compiled: bool) -> None:
    linear = torch.compile(fp8.multiply) if is_compiled else fp8.multiply
    found, expected = differentiate(linear, rows), differentiate(functional.linear, rows)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        difference = float((one.float() - other.float()).norm() / other.float().norm())
        assert 1e-3 < difference < 0.08


def test_moments_in_bf16_follow_fp32() -> None:
    weights = [nn.Parameter(torch.zeros(64, 32, device="cuda")) for _ in range(2)]
    small, plain = Bf16AdamW(weights[:1], lr=1e-3), AdamW(weights[1:], lr=1e-3)
    for number in range(100):
        generator = torch.Generator("cuda").manual_seed(number)
        gradient = torch.randn(64, 32, device="cuda", generator=generator) + 0.5
        for weight, optimizer in zip(weights, (small, plain), strict=True):
            weight.grad = gradient
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=0.02, atol=0.002)
    assert all(v.dtype == torch.bfloat16 for k, v in small.state[weights[0]].items() if k != "step")
