"""``--fp8``: the blocks' large matrix products in 8-bit floating point, in training.

Each tensor is scaled by its largest value right before it is rounded, so there is no history of
scales to keep, and weights, gradients, optimizer and checkpoints are those of a bf16 run. Inputs
and weights are rounded to e4m3; gradients, which have a wider range, to e5m2.
"""

from __future__ import annotations

import functools
from itertools import permutations
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.fp8 import operator
from rapidformer.accel.fp8.operator import can_run
from rapidformer.accel.fp8.product import (
    BACKWARD,
    FORWARD,
    MULTIPLE,
    get_scale,
    lay_out,
    multiply,
    quantize,
    restore,
)
from rapidformer.accel.precision import processor
from rapidformer.compat.torch_dispatch import multiply_scaled
from rapidformer.compat.torch_modules import list_hooks
from rapidformer.compat.transformers_models import is_conv1d, is_silu
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
                return cls.forward(self, *args, **kwargs)
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
            return cls.forward(self, x)
        return multiply(x, self.weight.t(), self.bias)

    return {"forward": forward}


def _is_due(layer: nn.Module, input: Tensor) -> bool:
    """Whether to use fp8: in training, on at least one row (an expert may get none)."""
    is_training = layer.training and torch.is_grad_enabled()
    return is_training and torch.is_autocast_enabled(input.device.type) and input.numel() > 0


class Names(NamedTuple):
    """The attributes of a gated MLP that hold its layers."""

    gate: str
    up: str
    down: str


def find_names(module: nn.Module) -> Names | None:
    """The layers of a module that is a gated MLP and nothing else, or None."""
    layers = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
    if len(layers) != 3:
        return None
    formula = _trace(module)
    for names in map(Names._make, permutations(layers)):
        activated, up = f"silu({names.gate}(x))", f"{names.up}(x)"
        if formula in (f"{names.down}({activated} * {up})", f"{names.down}({up} * {activated})"):
            return names
    return None


def _trace(module: nn.Module) -> str:
    """The formula of a module in training; empty if there is none, or the module changes itself."""
    before = dict(vars(module))
    module.training = True  # fp8 is used in training only, and a module may do less in evaluation
    kept = {name: id(value) for name, value in vars(module).items()}
    try:
        formula = _describe(module)
        is_pure = {name: id(value) for name, value in vars(module).items()} == kept
    except Exception:  # a model's code may raise anything when it is traced
        return ""
    finally:
        vars(module).clear()
        vars(module).update(before)
    return formula if is_pure else ""


class _Tracer(fx.Tracer):
    """Treats every layer of a module as one call."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _describe(module: nn.Module) -> str:
    """What a module computes from its only argument, as a formula such as ``down(up(x))``."""
    formulas: dict[Any, str] = {}
    for node in _Tracer().trace(module).nodes:
        values = [formulas.get(argument, repr(argument)) for argument in node.args]
        if node.op == "output":
            return values[0]
        if node.op == "placeholder":
            if formulas:
                return ""  # it has a second argument
            formulas[node] = "x"
        elif node.target is mul:
            formulas[node] = " * ".join(values)
        else:
            formulas[node] = f"{_name(module, node)}({', '.join(values)})"
    return ""


def _name(module: nn.Module, node: fx.Node) -> str:
    """The name of a call in a formula: ``silu`` for both forms of it, a layer's attribute."""
    if node.op == "call_module":
        is_activation = is_silu(type(module.get_submodule(str(node.target))))
    else:
        is_activation = node.target is functional.silu
    return "silu" if is_activation else str(node.target)


def multiply_gated(input: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Run the MLP with these weights, under autocast."""
    rows, added = lay_out(input)
    return restore(_GatedProduct.apply(rows, gate, up, down), input, added)


class _GatedProduct(torch.autograd.Function):
    """Saves its input and weights in fp8, and the outputs of ``gate`` and ``up``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *weights: Tensor) -> Tensor:
        small_rows, rows_scale = quantize(rows, FORWARD)
        (gate, gate_scale), (up, up_scale), (down, down_scale) = (
            quantize(weight, FORWARD) for weight in weights
        )
        multiply = functools.partial(multiply_scaled, dtype=rows.dtype, is_fast=True)
        gate_output = multiply(small_rows, rows_scale, gate.t(), gate_scale)
        up_output = multiply(small_rows, rows_scale, up.t(), up_scale)
        scale = get_scale(operator.find_largest(gate_output, up_output).amax(), FORWARD)
        product = operator.round_product(gate_output, up_output, scale)
        ctx.save_for_backward(
            small_rows, rows_scale, gate, gate_scale, up, up_scale, down, down_scale,
            gate_output, up_output, scale,
        )  # fmt: skip
        ctx.dtypes = rows.dtype, weights[0].dtype
        return multiply(product, scale, down.t(), down_scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (
            rows, rows_scale, gate, gate_scale, up, up_scale, down, down_scale,
            gate_output, up_output, product_scale,
        ) = ctx.saved_tensors  # fmt: skip
        rows_dtype, weight_dtype = ctx.dtypes
        multiply = functools.partial(multiply_scaled, dtype=rows_dtype)
        gradient, scale = quantize(gradient, BACKWARD)
        to_product = multiply(gradient, scale, down, down_scale)
        largest = operator.find_largest_gradients(gate_output, up_output, to_product)
        # Two tensors, not views of one: scaled products need addresses that are multiples of 16.
        scales = [get_scale(values.amax(), BACKWARD) for values in largest.unbind()]
        to_gate, to_gate_t, to_up, to_up_t, product_t = operator.round_gradients(
            gate_output, up_output, to_product, product_scale, *scales
        )
        to_rows = None
        if ctx.needs_input_grad[0]:
            to_rows = multiply(to_gate, scales[0], gate, gate_scale)
            to_rows = to_rows + multiply(to_up, scales[1], up, up_scale)
        # A separate kernel: torch.compile would transpose in a normalization's kernel, whose
        # programs handle one row each and would write single bytes.
        rows_t = operator.transpose(rows)
        multiply = functools.partial(multiply_scaled, dtype=weight_dtype)
        return (
            to_rows,
            multiply(to_gate_t, scales[0], rows_t.t(), rows_scale),
            multiply(to_up_t, scales[1], rows_t.t(), rows_scale),
            multiply(gradient.t(), scale, product_t.t(), product_scale),
        )
