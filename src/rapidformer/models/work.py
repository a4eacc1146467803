"""How much arithmetic training takes, for the model FLOP utilization (MFU) in the log.

The model's own work is counted, not what the hardware executes: padding and recomputation add
nothing. Floating-point operations of a training step:

    6 x each weight of a matrix product x its tokens      4 x if the weight is frozen
    + 12 x layers x heads x head size x tokens x tokens per row      half of it if causal

These are the layers with attention: what others do along the tokens is a few percent of their work.
A tied table counts once, as the head. Of a mixture of experts, only the experts that a token uses
count. Classification heads, norms and activations are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from rapidformer.models.configuration import get_size
from rapidformer.models.towers import (
    get_shared,
    get_text_config,
    is_inside,
    list_frozen_parts,
    list_layer_kinds,
    list_values,
)

_PRODUCTS = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.MultiheadAttention)
_FORWARD_AND_BACKWARD = 6
_WITHOUT_WEIGHT_GRADIENT = 4
_NO_ATTENTION = ("linear_attention", "mamba", "recurrent", "conv", "mlp", "moe")
"""Kinds of layers, in transformers' words."""


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """Floating-point operations of training, by what they grow with."""

    per_token: float
    """Products with weights. In an encoder-decoder, those of the encoder."""
    per_target: float = 0.0
    """The same for the tokens of a decoder that follows an encoder."""
    per_pair: float = 0.0
    """Attention: for a token and another one of its row."""
    is_causal: bool = False
    window: int | None = None
    """How many tokens a token attends to at most, in layers with a window."""
    windowed: float = 1.0
    """The share of such layers among those with attention."""
    has_decoder: bool = False
    weights: int = 0
    """The weights that are multiplied."""

    def count(self, *, tokens: int, targets: int, rows: int, is_packed: bool = False) -> float:
        """For this many real tokens, in an encoder-decoder for its sources and targets."""
        products = self.per_token * tokens + self.per_target * targets
        if not rows or is_packed:  # a packed row has several texts, whose lengths are not known
            return products
        length = tokens / rows
        if self.has_decoder:
            pairs = tokens * length + targets * (targets / rows) / 2 + targets * length
            return products + self.per_pair * pairs
        attended = length + self.windowed * (min(length, self.window or length) - length)
        return products + self.per_pair * tokens * attended * (0.5 if self.is_causal else 1)

    def describe(self) -> str:
        """The formula with this model's numbers."""
        weights = f"6 x {_count(self.weights)} weights per token"
        if not self.per_pair:
            return weights
        attention = self.per_pair * (0.5 if self.is_causal and not self.has_decoder else 1)
        return f"{weights} + {_count(attention)} x tokens per row"


def count_work(model: Any) -> ModelWork:
    """The work of a model before it is split; one without a known size has no attention term."""
    config, encoder = getattr(model, "config", None), None
    if getattr(config, "is_encoder_decoder", False) and hasattr(model, "get_encoder"):
        encoder = model.get_encoder()
    inside = {id(p) for p in encoder.parameters()} if encoder is not None else set()
    per_token = per_target = 0.0
    weights = 0
    for weight, fraction in _iterate_products(model):
        factor = _FORWARD_AND_BACKWARD if weight.requires_grad else _WITHOUT_WEIGHT_GRADIENT
        work = factor * fraction * weight.numel()
        weights += round(fraction * weight.numel())
        if encoder is not None and id(weight) not in inside:
            per_target += work
        else:
            per_token += work
    window = _read_window(get_text_config(config))
    kinds = _list_attention(config)
    windowed = sum("sliding" in kind for kind in kinds)  # if none is, all have the window
    return ModelWork(
        per_token=per_token, per_target=per_target, per_pair=_count_attention(config),
        is_causal=any(getattr(m, "is_causal", False) is True for m in model.modules()),
        window=window if isinstance(window, int) else None,
        windowed=windowed / len(kinds) if windowed else 1.0,
        has_decoder=encoder is not None, weights=weights,
    )  # fmt: skip


def _iterate_products(model: nn.Module) -> Iterator[tuple[nn.Parameter, float]]:
    """Each weight that is multiplied, once, with the fraction of it that a token uses."""
    seen: set[int] = set()
    config = get_text_config(getattr(model, "config", None))
    idle = list_frozen_parts(model)  # text does not reach them
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    counts = (getattr(config, name, None) for name in names)
    total = next((count for count in counts if isinstance(count, int)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    used = chosen / total if total and isinstance(chosen, int) else 1.0
    for name, module in model.named_modules():
        if is_inside(name, idle):
            continue
        is_expert = "experts" in name.split(".")
        for parameter in module.parameters(recurse=False):
            is_product = isinstance(module, _PRODUCTS) or parameter.dim() == 3
            if parameter.dim() < 2 or id(parameter) in seen or not is_product:
                continue
            seen.add(id(parameter))
            yield parameter, used if is_expert else 1.0


def _list_attention(config: Any) -> list[str]:
    """The kind of each layer that has attention."""
    layers = get_size(config, "num_layers")
    if not isinstance(layers, int):
        return []
    kinds = list_layer_kinds(config)[:layers] or ["attention"] * layers
    return [kind for kind in kinds if kind not in _NO_ATTENTION]


def _count_attention(config: Any) -> float:
    layers, config = len(_list_attention(config)), get_text_config(config)
    heads, hidden = (get_size(config, name) for name in ("num_attention_heads", "hidden_size"))
    if not (isinstance(heads, int) and isinstance(hidden, int)):
        return 0.0
    sizes = list_values(config, "head_dim") or list_values(config, "d_kv") or [hidden // heads]
    return 12.0 * layers * heads * sum(sizes) / len(sizes)


def _count(number: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {suffix}"
    return f"{number:.0f}"


def _read_window(config: Any) -> int | None:
    """How far back attention looks; None if that is not limited, or differs between blocks."""
    window: int | None = get_shared(config, "sliding_window")
    return window
