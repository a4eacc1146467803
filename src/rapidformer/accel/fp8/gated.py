"""Gated MLPs, ``down(silu(gate(x)) * up(x))``, as one function: two reads in each pass."""

from __future__ import annotations

import functools
from itertools import permutations
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from rapidformer.accel.fp8 import operator
from rapidformer.accel.fp8.product import BACKWARD, FORWARD, get_scale, lay_out, quantize, restore
from rapidformer.compat.torch_dispatch import multiply_scaled
from rapidformer.compat.transformers_models import is_silu


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
