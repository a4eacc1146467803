"""``--fp8``: the blocks' large matrix products in 8-bit floating point, in training.

Each tensor is scaled by its largest value right before it is rounded, so there is no history of
scales to keep, and weights, gradients, optimizer and checkpoints are those of a bf16 run. Inputs
and weights are rounded to e4m3; gradients, which have a wider range, to e5m2.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.fp8.gated import Names, find_names, multiply_gated
from rapidformer.accel.fp8.operator import can_run
from rapidformer.accel.fp8.product import MULTIPLE, multiply
from rapidformer.accel.precision import processor
from rapidformer.compat.torch_modules import list_hooks
from rapidformer.compat.transformers_models import is_conv1d
from rapidformer.errors import ConfigurationError
from rapidformer.models.plan import ModelPlan
from rapidformer.overlay import extend, get_own_class, list_layers

SMALLEST = 1024
"""Inputs and outputs of a layer: below, rounding costs more time than the faster product saves."""
_FIRST_CAPABILITY = (8, 9)


def find_device_problem(device: torch.device) -> str | None:
    """Why fp8 cannot work on a device; None if it can."""
    if device.type == "cpu":
        if processor.is_emulation_wanted():
            return None
        name = "a CPU"
    else:
        # AMD GPUs use another fp8 format.
        is_nvidia = torch.version.hip is None
        if is_nvidia and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY:
            return None
        name = torch.cuda.get_device_name(device)
    return (
        "it needs an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell), and "
        f"this run is on {name}"
    )


def apply(assembly: Assembly) -> str:
    """Convert the large linear layers of this rank's blocks."""
    fuses_gated = can_run(assembly.device)
    converted, total = apply_fp8(assembly.model, assembly.plan, fuses_gated=fuses_gated)
    return (
        f"{converted} of {total} linear layers in the blocks multiply in fp8 in training (a choice "
        "of precision: results differ from bf16)"
    )


def apply_fp8(model: nn.Module, plan: ModelPlan, *, fuses_gated: bool = False) -> tuple[int, int]:
    """Convert the large linear layers; returns how many, and how many linear layers there are."""
    modules = (module for block in plan.get_blocks(model) for module in block.modules())
    # Blocks may share layers (ALBERT's do).
    layers = [module for module in dict.fromkeys(modules) if _get_builder(module) is not None]
    shapes = {layer: layer.get_parameter("weight").shape for layer in layers}
    large = [m for m in layers if all(n >= SMALLEST and n % MULTIPLE == 0 for n in shapes[m])]
    if not large:
        raise ConfigurationError(
            f"--fp8: no block of {type(model).__name__} has a linear layer with at least "
            f"{SMALLEST:,} inputs and outputs, both multiples of {MULTIPLE}, so fp8 would gain "
            "nothing. Leave out --fp8."
        )
    for layer in large:
        extend(layer, "fp8", _get_builder(layer), is_shared=True)
    for module in model.modules() if fuses_gated else ():
        names = find_names(module)
        # Whatever else a layer's call does would be left out.
        if names and all(list_layers(module.get_submodule(name)) == ["fp8"] for name in names):
            extend(module, "fp8", _get_gated_builder(names), is_shared=True)
    return len(large), len(layers)


@functools.cache
def _get_gated_builder(names: Names) -> Any:
    """What builds the overlay of a gated MLP with these layers: it runs as one function."""

    def build(cls: Any) -> dict[str, Any]:
        def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
            (input,) = (*args, *kwargs.values())
            layers = [self.get_submodule(name) for name in names]
            if not (_is_due(self, input) and _can_skip_calls(self, layers)):
                output: Tensor = cls.forward(self, *args, **kwargs)
                return output
            gate, up, down = (layer.get_parameter("weight") for layer in layers)
            return multiply_gated(input, gate, up, down)

        return {"forward": forward}

    return build


def _can_skip_calls(module: nn.Module, layers: list[Any]) -> bool:
    """Whether the layers have trained weights and nothing else: no biases, no hooks to run."""
    is_bare = all(layer.bias is None and layer.weight.requires_grad for layer in layers)
    return is_bare and not any(list_hooks(child) for child in module.children())


def _get_builder(layer: nn.Module) -> Any:
    """What builds the overlay of a linear layer; None for any other module."""
    if "forward" in vars(layer):
        return None  # replaced on the object itself: ours would never be called
    cls = get_own_class(layer)
    if cls is nn.Linear:
        return _build_linear
    return _build_transposed if is_conv1d(cls) else None


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
    """Whether to use fp8: in training, on at least one row (an expert may get none)."""
    is_training = layer.training and torch.is_grad_enabled()
    return is_training and torch.is_autocast_enabled(input.device.type) and input.numel() > 0
