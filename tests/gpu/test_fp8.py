"""``--fp8`` and Adam's moments in bf16 on a GPU, compiled, against bf16 and fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from rapidformer.accel.fp8 import plain, product
from rapidformer.accel.fp8.layers import multiply_gated
from rapidformer.accel.fp8.operator import can_run
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
    linear = torch.compile(product.multiply) if is_compiled else product.multiply
    found, expected = differentiate(linear, rows), differentiate(functional.linear, rows)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        difference = float((one.float() - other.float()).norm() / other.float().norm())
        assert 1e-3 < difference < 0.08


@needs_fp8
@pytest.mark.parametrize("shape", [(256, 512), (48, 80)])
def test_kernels_round_like_torch(shape: tuple[int, int]) -> None:
    """But for elements halfway between two numbers, as far as the last bit of silu decides."""
    from rapidformer.accel.fp8 import kernel

    assert can_run(torch.device("cuda", 0))
    generator = torch.Generator("cuda").manual_seed(1)
    gate, up, gradient = torch.randn(3, *shape, device="cuda", generator=generator).bfloat16() * 3
    for found, expected in (
        (kernel.find_largest(gate, up), plain.find_largest(gate, up)),
        (
            kernel.find_largest_gradients(gate, up, gradient),
            plain.find_largest_gradients(gate, up, gradient),
        ),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    scale = torch.full((), 2**-4, device="cuda")
    for name in ("round_product", "round_gradients", "transpose"):
        results = [run(module, name, gate, up, gradient, scale) for module in (kernel, plain)]
        for one, other in zip(*results, strict=True):
            differs = one.float() != other.float()
            assert float(differs.float().mean()) < 1e-3
            torch.testing.assert_close(one.float(), other.float(), rtol=0.25, atol=1e-3)


def run(module: Any, name: str, gate: Tensor, up: Tensor, *others: Tensor) -> list[Tensor]:
    gradient, scale = others
    shape, other = gate.shape, gate.shape[::-1]
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    small = (up * 16).to(e4m3)
    kinds, given = {
        "round_product": ([(shape, e4m3)], (gate, up, scale)),
        "round_gradients": (
            [(shape, e5m2), (other, e5m2), (shape, e5m2), (other, e5m2), (other, e4m3)],
            (gate, up, gradient, [scale] * 3),
        ),
        "transpose": ([(other, e4m3)], (small,)),
    }[name]
    outputs = [torch.empty(size, dtype=dtype, device="cuda") for size, dtype in kinds]
    getattr(module, name)(*given, outputs if name == "round_gradients" else outputs[0])
    return outputs


@needs_fp8
def test_other_numbers_of_rows_compile_no_kernel_again(compilations: list[str]) -> None:
    from rapidformer.accel.fp8 import kernel

    def run_all(rows: int) -> None:
        gate = torch.ones(rows, 64, device="cuda", dtype=torch.bfloat16)
        kernel.find_largest(gate, gate)
        kernel.find_largest_gradients(gate, gate, gate)
        for name in ("round_product", "round_gradients", "transpose"):
            run(kernel, name, gate, gate, gate, torch.ones((), device="cuda"))

    run_all(2048)
    compilations.clear()
    for rows in (16, 48, 64, 1040):
        run_all(rows)
    assert compilations == []


@needs_fp8
def test_offsets_beyond_32_bits() -> None:
    from rapidformer.accel.fp8 import kernel

    rows, columns = 2**17 + 16, 2**14
    tensor = torch.zeros(rows, columns, device="cuda", dtype=torch.float8_e4m3fn)
    tensor[-16:] = torch.randn(16, columns, device="cuda").to(tensor.dtype)
    output = torch.empty(columns, rows, device="cuda", dtype=tensor.dtype)
    kernel.transpose(tensor, output)
    assert torch.equal(output[:, -16:].float(), tensor[-16:].float().t())
    assert not bool(output[-1, :-16].view(torch.uint8).any())


@needs_fp8
def test_kernels_keep_nan() -> None:
    from rapidformer.accel.fp8 import kernel

    gate = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    gate[0, 0] = torch.nan
    output = torch.empty_like(gate, dtype=torch.float8_e4m3fn)
    kernel.round_product(gate, gate, torch.ones((), device="cuda"), output)
    assert output.float().isnan().sum() == 1


@needs_fp8
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_gated_mlp_as_a_whole_is_as_exact_as_its_layers(is_compiled: bool) -> None:
    def apply_layers(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = functional.silu(product.multiply(x, gate, None)) * product.multiply(x, up, None)
        return product.multiply(hidden, down, None)

    def apply_exactly(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        x, gate, up, down = (tensor.double() for tensor in (x, gate, up, down))
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    generator = torch.Generator("cuda").manual_seed(1)
    sizes = (50, 256), (1024, 256), (1024, 256), (256, 1024)
    tensors = [
        torch.randn(size, device="cuda", generator=generator).requires_grad_() for size in sizes
    ]
    whole = torch.compile(multiply_gated) if is_compiled else multiply_gated
    results = []
    for apply in (whole, apply_layers, apply_exactly):
        with torch.autocast("cuda", torch.bfloat16, enabled=apply is not apply_exactly):
            output = apply(*tensors)
        gradient = torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output)
        gradients = torch.autograd.grad(output, tensors, gradient.to(output.dtype))
        results.append([output.detach(), *gradients])
    for one, other, exact in zip(*results, strict=True):
        assert one.dtype == other.dtype
        errors = [float((found.double() - exact).norm() / exact.norm()) for found in (one, other)]
        assert errors[0] < 1.1 * errors[1] < 0.2


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
