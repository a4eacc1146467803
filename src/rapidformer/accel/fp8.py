"""``--fp8``: the blocks' large matrix products in 8-bit floating point.

Each tensor is scaled by its largest value right before it is rounded, so there is no history of
scales to keep: weights, gradients, optimizer and checkpoints are those of a bf16 run. Inputs and
weights are rounded to e4m3, gradients, which have a wider range, to e5m2. Evaluation and generation
use bf16, like everything outside these products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel import processor
from rapidformer.accel.assembly import Assembly
from rapidformer.compat.torch_fp8 import multiply_scaled
from rapidformer.compat.transformers_models import is_conv1d
from rapidformer.errors import ConfigurationError
from rapidformer.models.plan import ModelPlan
from rapidformer.overlay import extend, get_own_class

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# Below this, rounding costs more time than the faster product saves.
SMALLEST = 1024
_MULTIPLE = 16
_SMALLEST_VALUE = 1e-30
_FIRST_CAPABILITY = (8, 9)


def find_fp8_problem(device: torch.device) -> str | None:
    """Why a device cannot be used: it has no fp8 products."""
    if device.type == "cpu":
        if processor.is_emulation_wanted():
            return None
        name = "a CPU"
    else:
        # AMD's GPUs have another fp8 format.
        is_nvidia = torch.version.hip is None
        if is_nvidia and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY:
            return None
        name = torch.cuda.get_device_name(device)
    return (
        f"--fp8 needs an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell); "
        f"this run is on {name}. Leave out --fp8."
    )


def apply(assembly: Assembly) -> str:
    """Convert the large linear layers of this rank's blocks."""
    converted, found = apply_fp8(assembly.model, assembly.plan)
    return (
        f"{converted} of {found} linear layers in the blocks multiply in fp8 in training (a choice "
        "of precision: results differ from bf16)"
    )


def apply_fp8(model: nn.Module, plan: ModelPlan) -> tuple[int, int]:
    """Convert the large linear layers; how many, and of how many."""
    modules = (module for block in plan.get_blocks(model) for module in block.modules())
    # Blocks may share layers (ALBERT's do).
    layers = [module for module in dict.fromkeys(modules) if _get_builder(module) is not None]
    large = [layer for layer in layers if _is_large(layer)]
    if not large:
        raise ConfigurationError(
            f"--fp8: no block of {type(model).__name__} has a linear layer with at least "
            f"{SMALLEST:,} inputs and outputs, both multiples of {_MULTIPLE}, so fp8 would gain "
            "nothing. Leave out --fp8."
        )
    for layer in large:
        extend(layer, "fp8", _get_builder(layer), is_shared=True)
    return len(large), len(layers)


def _get_builder(layer: nn.Module) -> Any:
    cls = get_own_class(layer)
    if cls is nn.Linear:
        return _build_linear
    return _build_transposed if is_conv1d(cls) else None


def _is_large(layer: nn.Module) -> bool:
    weight = layer.get_parameter("weight")
    return all(size >= SMALLEST and size % _MULTIPLE == 0 for size in weight.shape)


def _build_linear(cls: type[nn.Linear]) -> dict[str, Any]:
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if not _is_due(self, input):
            return cls.forward(self, input)
        return multiply(input, self.weight, self.bias)

    return {"forward": forward}


def _build_transposed(cls: Any) -> dict[str, Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not _is_due(self, x):
            output: Tensor = cls.forward(self, x)
            return output
        return multiply(x, self.weight.t(), self.bias)

    return {"forward": forward}


def _is_due(layer: nn.Module, input: Tensor) -> bool:
    """In training, on at least one row: an expert may get none."""
    is_training = layer.training and torch.is_grad_enabled()
    return is_training and torch.is_autocast_enabled(input.device.type) and input.numel() > 0


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``functional.linear`` with an fp8 product, under autocast."""
    dtype = torch.get_autocast_dtype(input.device.type)
    rows = input.to(dtype).reshape(-1, input.shape[-1])
    count = rows.shape[0]
    missing = -count % _MULTIPLE
    if missing:
        # The weight's gradient sums over rows, and the kernel sums over multiples of 16.
        rows = functional.pad(rows, (0, 0, 0, missing))
    output: Tensor = _Product.apply(rows, weight)
    if missing:
        output = output[:count]
    if bias is not None:
        output = output + bias.to(dtype)
    return output.reshape(*input.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """``rows @ weight.t()``; what it keeps for the backward pass is in fp8 too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        small_rows, rows_scale = quantize(rows, FORWARD)
        small_weight, weight_scale = quantize(weight, FORWARD)
        # Only the weight's gradient needs the rows: a frozen layer keeps none.
        kept = (small_rows, rows_scale) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(small_weight, weight_scale, *kept)
        ctx.dtypes = rows.dtype, weight.dtype
        return multiply_scaled(
            small_rows, rows_scale, small_weight.t(), weight_scale, dtype=rows.dtype, is_fast=True
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, weight_scale, *kept = ctx.saved_tensors
        rows_dtype, weight_dtype = ctx.dtypes
        gradient, scale = quantize(gradient, BACKWARD)
        to_rows = to_weight = None
        if ctx.needs_input_grad[0]:
            to_rows = multiply_scaled(gradient, scale, weight, weight_scale, dtype=rows_dtype)
        if ctx.needs_input_grad[1]:
            to_weight = multiply_scaled(gradient.t(), scale, *kept, dtype=weight_dtype)
        return to_rows, to_weight


def quantize(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in fp8, and the scale that restores it."""
    largest = torch.finfo(dtype).max
    scale = tensor.abs().amax().float().clamp(min=_SMALLEST_VALUE) / largest
    # Casting does not saturate: what rounding puts above the largest value would become NaN.
    return (tensor.float() / scale).clamp(-largest, largest).to(dtype), scale
