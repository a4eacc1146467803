"""The kernels as torch operators, opaque to torch.compile; ``plain.py`` without Triton."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from rapidformer.accel.fp8 import plain
from rapidformer.accel.fp8.product import BACKWARD, FORWARD, PART
from rapidformer.compat.triton import has_triton, works


@functools.cache
def can_run(device: torch.device) -> bool:
    """Whether the kernels work on a device. They are tried once; a warning says why they do not."""
    return has_triton(device) and works("fp8", functools.partial(_try, device))


def _try(device: torch.device) -> None:
    """Compare the kernels with torch's operations, including values that are clamped."""
    from rapidformer.accel.fp8 import kernel

    values = torch.linspace(-4, 4, 3 * 64 * 48, device=device).to(torch.bfloat16).view(3, 64, 48)
    for power in (4, 16):
        scale = torch.full((), 2.0**-power, device=device)
        results = (_run(module, values, scale) for module in (kernel, plain))
        for found, expected in zip(*results, strict=True):
            error = float((found.float() - expected.float()).norm() / expected.float().norm())
            if not error < 0.01:
                raise RuntimeError(f"a result is off by {error:g}")


def _run(module: ModuleType, values: Tensor, scale: Tensor) -> list[Tensor]:
    """The results of all functions of ``kernel`` or ``plain``."""
    gate, up, gradient = values.unbind()
    rounded, outputs = torch.empty_like(gate, dtype=FORWARD), _make_outputs(gate)
    transposed = rounded.new_empty(rounded.shape[::-1])
    module.round_product(gate, up, scale, rounded)
    module.round_gradients(gate, up, gradient, [scale] * 3, outputs)
    module.transpose(rounded, transposed)
    largest = module.find_largest(gate, up), module.find_largest_gradients(gate, up, gradient)
    return [rounded, *outputs, transposed, *largest]


def _choose(device: torch.device) -> ModuleType:
    """The module that computes on a device."""
    if not can_run(device):
        return plain
    from rapidformer.accel.fp8 import kernel

    return kernel


@torch.library.custom_op("rapidformer::transpose_fp8", mutates_args=())
def transpose(tensor: Tensor) -> Tensor:
    """A contiguous copy of an fp8 matrix's transpose."""
    output = tensor.new_empty(tensor.shape[::-1])
    _choose(tensor.device).transpose(tensor.contiguous(), output)
    return output


@transpose.register_fake
def _(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape[::-1])


@torch.library.custom_op("rapidformer::find_largest_gated", mutates_args=())
def find_largest(gate: Tensor, up: Tensor) -> Tensor:
    """The largest absolute values of ``silu(gate) * up``, one per part."""
    return _choose(gate.device).find_largest(gate, up)


@find_largest.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(_count_parts(gate), dtype=torch.float32)


@torch.library.custom_op("rapidformer::find_largest_gated_gradients", mutates_args=())
def find_largest_gradients(gate: Tensor, up: Tensor, gradient: Tensor) -> Tensor:
    """The largest absolute values of the gradients of ``gate`` and ``up``: [2, parts]."""
    return _choose(gate.device).find_largest_gradients(gate, up, gradient)


@find_largest_gradients.register_fake
def _(gate: Tensor, up: Tensor, gradient: Tensor) -> Tensor:
    return gate.new_empty((2, _count_parts(gate)), dtype=torch.float32)


@torch.library.custom_op("rapidformer::round_gated", mutates_args=())
def round_product(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """``silu(gate) * up / scale`` in fp8."""
    output = gate.new_empty(gate.shape, dtype=FORWARD)
    _choose(gate.device).round_product(gate, up, scale, output)
    return output


@round_product.register_fake
def _(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    return gate.new_empty(gate.shape, dtype=FORWARD)


@torch.library.custom_op("rapidformer::round_gated_gradients", mutates_args=())
def round_gradients(
    gate: Tensor, up: Tensor, gradient: Tensor, scale: Tensor, gate_scale: Tensor, up_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In fp8: the gradients of gate and up, each also transposed, and the product transposed."""
    outputs = _make_outputs(gate)
    scales = (scale, gate_scale, up_scale)
    _choose(gate.device).round_gradients(gate, up, gradient, scales, outputs)
    return outputs


@round_gradients.register_fake
def _(
    gate: Tensor, up: Tensor, gradient: Tensor, scale: Tensor, gate_scale: Tensor, up_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _make_outputs(gate)


def _make_outputs(gate: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape, other = gate.shape, gate.shape[::-1]
    return (
        gate.new_empty(shape, dtype=BACKWARD),
        gate.new_empty(other, dtype=BACKWARD),
        gate.new_empty(shape, dtype=BACKWARD),
        gate.new_empty(other, dtype=BACKWARD),
        gate.new_empty(other, dtype=FORWARD),
    )


def _count_parts(gate: Tensor) -> int:
    return -(-gate.numel() // PART)
