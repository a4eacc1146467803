"""Run transformers' mixtures of experts in 16 bits and compiled.

transformers multiplies each expert's tokens with torch's ``grouped_mm``, which autocast does not
cover and torch.compile supports in bf16 only. Here its inputs are cast like those of any other
product, and the fp32 product is an operator of our own, which torch.compile does not trace into.

JetMoE and Aria split the tokens by numbers that they read from the device: each step waits for it,
and torch.compile makes a graph for each split. They get the same product here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.context.exchanged_attention import find_configs
from rapidformer.compat.patches import Entry, Needed, Patch
from rapidformer.compat.transformers_models import (
    apply_expert_gate,
    get_expert_table,
    get_experts,
    get_own_name,
    set_experts,
)
from rapidformer.overlay import extend, get_own_class, put_fact

NAME = "rapidformer_grouped"
_EXPERTS = Patch(lambda: [Entry(get_expert_table(), NAME, lambda _: compute_experts)])
"""Inside, transformers' interface has our implementation."""


def apply(assembly: Assembly) -> str | None:
    """Compute experts here if they would be in fp32, or compiled in pieces."""
    if not _has_product(assembly.device):
        return None
    count = apply_grouped_experts(assembly.model, assembly.device)
    count += extend_own_experts(assembly.model)
    return "in 16 bits, and compiled as one graph" if count else None


class _Experts(Needed):
    """A module's configuration has chosen our implementation."""


def apply_grouped_experts(model: nn.Module, device: torch.device) -> int:
    """Let transformers' models compute experts here, unless the user chose an implementation."""
    if not _has_product(device):
        return 0
    configs = [config for config in find_configs(model) if get_experts(config) == "grouped_mm"]
    if not configs:
        return 0
    for config in configs:
        set_experts(config, NAME)
    chosen = _Experts(_EXPERTS)
    for module in model.modules():
        put_fact(module, chosen)
    return len(configs)


def _has_product(device: torch.device) -> bool:
    """Whether torch has ``grouped_mm`` on this device."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def extend_own_experts(model: nn.Module) -> int:
    """The same for models that compute experts in their own code; returns how many layers."""
    count = 0
    for module in model.modules():
        build = _OWN_EXPERTS.get(get_own_name(get_own_class(module)))
        if build is not None:
            extend(module, "mixture", build, is_shared=True)
            count += 1
    return count


def _build_gating(cls: Any) -> dict[str, Any]:
    """JetMoE's choice of experts; instead of how many tokens each gets, where these end."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
        logits = self.layer(hidden_states).float()
        chosen_logits, chosen = logits.topk(self.top_k, dim=1)
        gates = torch.softmax(chosen_logits, dim=1).type_as(hidden_states)
        experts, order = chosen.flatten().sort(0)
        places = torch.arange(self.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, places, right=True, out_int32=True)
        return order, order // self.top_k, gates.flatten()[order], ends, logits

    return {"forward": forward}


def _build_parallel_experts(cls: Any) -> dict[str, Any]:
    def forward(self: Any, inputs: Tensor, expert_size: Tensor) -> Tensor:
        return multiply(inputs, self.weight.transpose(-2, -1), expert_size)

    return {"forward": forward}


def _build_expert_product(cls: Any) -> dict[str, Any]:
    def forward(self: Any, input: Tensor, tokens_per_expert: Tensor) -> Tensor:
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        return multiply(input, self.weight, ends).to(input.dtype)

    return {"forward": forward}


_OWN_EXPERTS = {
    "transformers.models.jetmoe.modeling_jetmoe.JetMoeTopKGating": _build_gating,
    "transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts": _build_parallel_experts,
    "transformers.models.aria.modeling_aria.AriaGroupedExpertsGemm": _build_expert_product,
}


def compute_experts(self: Any, hidden: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
    """For each of [tokens, size], the weighted sum of the outputs of its experts."""
    count = chosen.shape[-1]
    # Sorted by expert, the rows of each one are next to each other.
    ids, order = chosen.flatten().sort()
    experts = torch.arange(self.num_experts, device=ids.device)
    ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    inner = _run_linear(self, name, hidden[order // count], ids, ends)
    inner = apply_expert_gate(self, inner) if self.has_gate else self.act_fn(inner)
    output = _run_linear(self, "down_proj", inner, ids, ends) * factors.flatten()[order, None]
    output = output[order.argsort()].view(len(hidden), count, -1).sum(1)
    return output.to(hidden.dtype)


def _run_linear(module: Any, name: str, rows: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
    """One linear layer of every expert, for rows sorted by expert."""
    weight: Tensor = getattr(module, name)
    product = multiply(rows, weight if module.is_transposed else weight.transpose(-2, -1), ends)
    if module.has_bias:
        bias: Tensor = getattr(module, f"{name}_bias")
        product = product + bias[ids].to(product.dtype)
    return product


def multiply(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Expert i's rows, up to ``ends[i]``, times its weight: [rows, in] x [experts, in, out]."""
    kind = rows.device.type
    # The kernel reads 16 bytes at a time, which is 8 elements of 16 bits.
    is_aligned = all(size % 8 == 0 for size in weights.shape[1:])
    if torch.is_autocast_enabled(kind) and is_aligned:
        dtype = torch.get_autocast_dtype(kind)
        rows, weights = rows.to(dtype), weights.to(dtype)
    else:
        rows = rows.to(weights.dtype)
    if rows.dtype == torch.bfloat16:
        return functional.grouped_mm(rows, weights, offs=ends)
    return _multiply(rows, weights, ends)


@torch.library.custom_op("rapidformer::grouped_product", mutates_args=())
def _multiply(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return functional.grouped_mm(rows, weights, offs=ends).contiguous()


@torch.library.custom_op("rapidformer::grouped_product_backward", mutates_args=())
def _multiply_backward(
    gradient: Tensor, rows: Tensor, weights: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    gradient = gradient.contiguous()
    of_rows = functional.grouped_mm(gradient, weights.transpose(-2, -1), offs=ends)
    of_weights = functional.grouped_mm(rows.T, gradient, offs=ends)
    return of_rows.contiguous(), of_weights.contiguous()


@_multiply.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@_multiply_backward.register_fake
def _(gradient: Tensor, rows: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _run_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return (*_multiply_backward(gradient, *ctx.saved_tensors), None)


_multiply.register_autograd(_run_backward, setup_context=_set_up)
