"""``--attention``: which kernel computes attention.

The kernels of torch's ``scaled_dot_product_attention`` are tried in an order; one that cannot take
a call's mask, bias, head size or dropout is passed over, so every order is exact. It holds inside
this model's calls only (``kernel_scope.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import attention
from torch.nn.attention import SDPBackend

from rapidformer.accel.applied import Applied
from rapidformer.accel.assembly import Assembly
from rapidformer.accel.attention import disentangled
from rapidformer.accel.attention.kernel_scope import KernelChoice, apply_choice
from rapidformer.accel.attention.learned_bias import interface
from rapidformer.accel.attention.own_code import modules as own_code
from rapidformer.accel.context.exchanged_attention import find_configs
from rapidformer.accel.small_tables import extend_table
from rapidformer.accel.unpad.sides import find_biased
from rapidformer.compat.patches import Change
from rapidformer.compat.transformers_models import (
    find_unknown_attention,
    get_attention,
    has_fixed_attention,
    set_attention,
    supports_flex_attention,
)
from rapidformer.errors import ConfigurationError
from rapidformer.models.towers import list_values
from rapidformer.overlay import extend

_CUDNN, _FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
_OTHERS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_ORDERS = {"cudnn": (_CUDNN, _FLASH, *_OTHERS), "flash": (_FLASH, _CUDNN, *_OTHERS)}
_NAMES = {"flex": "flex_attention", "eager": "eager"}
"""Those that transformers computes: our name to theirs."""
_HOPPER = (9, 0)
"""From here on cuDNN is the fastest for long rows in 16 bits (measured on an H200)."""
_LARGEST_HEADS = {"cudnn": 128, "flash": 256}
_FLASH_PACKAGES = {"FA4": "flash_attn.cute", "FA3": "flash_attn_interface"}
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What decides which kernels can run."""

    kind: str
    capability: tuple[int, int] = (0, 0)
    dtype: torch.dtype | None = None
    """The run's 16-bit type; None in fp32."""


def apply(assembly: Assembly) -> str | None:
    """Choose the attention of the model."""
    model, asked = assembly.model, assembly.args.attention
    is_cuda = assembly.device.type == "cuda"
    device = Device(
        kind=assembly.device.type,
        capability=torch.cuda.get_device_capability(assembly.device) if is_cuda else (0, 0),
        dtype=assembly.precision.dtype,
    )
    obstacle = find_obstacle(model, asked)
    if obstacle is not None:
        raise ConfigurationError(f"--attention {asked}: {obstacle}. Leave the flag out.")
    if asked in _NAMES:
        for config in find_configs(model):
            set_attention(config, _NAMES[asked])
        return f"{asked} attention"
    chosen = choose(asked, device)
    if chosen is None:
        return None
    takes_tokens = getattr(model, "main_input_name", "") == "input_ids"
    by_length = assembly.wants("varied lengths") and takes_tokens
    has_bias = bool(_find_biased(model)) or disentangled.is_applied(model)
    has_bias = has_bias or own_code.has_learned_bias(model)
    by_bias = (
        assembly.wants("learned bias kernel") and has_bias and interface.can_run(assembly.device)
    )
    unknown = find_unknown_attention() if by_length or by_bias else None
    is_known = unknown is None
    choice = KernelChoice(_ORDERS[chosen], by_length and is_known, by_bias and is_known)
    chosen_by = {"varied lengths": by_length, "learned bias kernel": by_bias}
    for name, is_on in chosen_by.items():
        if is_on and is_known:
            assembly.applied.add_part(name)
    blocks = assembly.plan.get_blocks(model) if assembly.plan.blocks else []
    apply_choice(model, blocks, choice)
    extra = _activate_flash(model, assembly.applied) if asked == "flash" else ""
    if choice.has_bias_kernel:
        extra = ", and our own kernel for the learned bias"
    if unknown is not None:
        extra = f"; not by length or bias, since {unknown}"
    return f"{chosen} first, if it can take the mask{extra}"


def choose(asked: str, device: Device) -> str | None:
    """The kernel to try first; None leaves torch's own order."""
    if asked != "auto":
        return asked if asked in _ORDERS else None
    is_fast = device.kind == "cuda" and device.capability >= _HOPPER and device.dtype is not None
    return "cudnn" if is_fast else None


def find_obstacle(model: nn.Module, asked: str) -> str | None:
    """Why this model cannot use the requested attention; the row has devices and precisions."""
    if asked in _NAMES:
        return _find_obstacle_of_model(model, asked)
    if asked not in _ORDERS:
        return None
    largest, size = _LARGEST_HEADS[asked], _get_head_size(model)
    if size > largest:
        return f"it takes heads of up to {largest}, and {type(model).__name__} has {size}"
    if _find_biased(model):
        return f"it does not take the relative position bias of {type(model).__name__}"
    return None


def _find_obstacle_of_model(model: Any, asked: str) -> str | None:
    """Why this model cannot use an attention that transformers computes."""
    name = type(model).__name__
    if not find_configs(model):
        return f"{name} is not a transformers model, and computes attention itself"
    if asked == "flex":
        if not supports_flex_attention(model):
            return f"{name} does not support it"
        if _get_dropout(model):
            return "FlexAttention has no dropout, and the model's configuration asks for it"
    if has_fixed_attention(model) and any(get_attention(c) != asked for c in find_configs(model)):
        return f"{name} computes attention in its own code"
    return None


def _get_head_size(model: nn.Module) -> int:
    """The largest head of the model, as far as its configurations say."""
    sizes = [0]
    for config in find_configs(model):
        heads = getattr(config, "num_attention_heads", None)
        width = getattr(config, "hidden_size", None)
        named = list_values(config, "head_dim") or list_values(config, "d_kv")
        if named:
            sizes += named
        elif isinstance(heads, int) and isinstance(width, int) and heads:
            sizes.append(width // heads)  # a Swin has a list of heads, one number per stage
    return max(sizes)


def _get_dropout(model: nn.Module) -> float:
    values = (getattr(c, name, 0.0) for c in find_configs(model) for name in _DROPOUTS)
    return max((value for value in values if isinstance(value, float)), default=0.0)


def _activate_flash(model: nn.Module, applied: Applied) -> str:
    """Let torch use a newer FlashAttention, for the whole process until the engine closes."""
    if not hasattr(attention, "activate_flash_attention_impl") or _get_dropout(model):
        return ""
    for name, package in _FLASH_PACKAGES.items():
        with suppress(ModuleNotFoundError):  # its parent is not installed
            if find_spec(package) is not None:
                applied.enter(_newer_flash(name))
                return f", with {name}"
    return ""


@functools.cache
def _newer_flash(name: str) -> Change:
    """Inside, torch's flash attention is this one."""

    def activate() -> Callable[[], None]:
        attention.activate_flash_attention_impl(name)
        return attention.restore_flash_attention_impl

    return Change(activate)


# ---- relative position bias ----------------------------------------------------------------------


def lay_out_biases(assembly: Assembly) -> str | None:
    """Row ``bias layout``."""
    count = apply_bias_layout(assembly.model)
    return f"of {count} attention layers" if count else None


def apply_bias_layout(model: nn.Module) -> int:
    """Lay out T5's bias as [1, heads, queries, keys] in memory; returns how many there are.

    T5 permutes a [queries, keys, heads] table. Fused kernels need adjacent keys, so torch would
    compute all of self-attention unfused, and in fp32.
    """
    biased = _find_biased(model)
    for module in biased:
        extend(module, "bias", _build_biased, is_shared=True)
        extend_table(module.relative_attention_bias)
    return len(biased)


def _find_biased(model: nn.Module) -> list[Any]:
    return [
        module
        for module in find_biased(model)
        if module.has_relative_attention_bias and hasattr(module, "relative_attention_bias")
    ]


def _build_biased(cls: Any) -> dict[str, Any]:
    @functools.wraps(cls.compute_bias)
    def compute_bias(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        bias: Tensor = cls.compute_bias(self, *args, **kwargs)
        return bias.contiguous()

    return {"compute_bias": compute_bias}
