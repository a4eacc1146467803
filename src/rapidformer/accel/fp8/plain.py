"""The functions of ``kernel.py`` in plain torch, for CPUs and if Triton is missing or fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.fp8.product import PART, scale_down


def find_largest(gate: Tensor, up: Tensor) -> Tensor:
    """The largest absolute values of ``silu(gate) * up``, one per part."""
    return _find_parts(_gate(gate, up))


def find_largest_gradients(gate: Tensor, up: Tensor, gradient: Tensor) -> Tensor:
    """The largest absolute values of the gradients of ``gate`` and ``up``: [2, parts]."""
    return torch.stack([_find_parts(part) for part in _differentiate(gate, up, gradient)])


def round_product(gate: Tensor, up: Tensor, scale: Tensor, output: Tensor) -> None:
    """Fill ``output`` with ``silu(gate) * up / scale``."""
    output.copy_(scale_down(_gate(gate, up), scale, output.dtype))


def round_gradients(
    gate: Tensor, up: Tensor, gradient: Tensor, scales: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Fill the outputs: gradients of gate and up, also transposed, and the product transposed."""
    product_scale, gate_scale, up_scale = scales
    to_gate, to_up = _differentiate(gate, up, gradient)
    values = (to_gate, to_gate.t(), to_up, to_up.t(), _gate(gate, up).t())
    all_scales = (gate_scale, gate_scale, up_scale, up_scale, product_scale)
    for output, value, scale in zip(outputs, values, all_scales, strict=True):
        output.copy_(scale_down(value, scale, output.dtype))


def transpose(tensor: Tensor, output: Tensor) -> None:
    """Fill ``output`` with the transposed matrix."""
    output.copy_(tensor.t())


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate.float()) * up.float()


def _differentiate(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    wide, sigmoid = gate.float(), gate.float().sigmoid()
    product = wide * sigmoid
    to_gate = gradient.float() * up.float() * (sigmoid + product * (1 - sigmoid))
    return to_gate, gradient.float() * product


def _find_parts(values: Tensor) -> Tensor:
    return torch.stack([part.amax() for part in values.abs().flatten().split(PART)])
