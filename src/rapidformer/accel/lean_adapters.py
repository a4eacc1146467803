"""Adapters under mixed precision: no casts that autocast would undo or repeat.

Autocast rounds a matrix to 16 bits for every product, and keeps the rounded copy only of trained
ones. A frozen matrix of a linear layer can be rounded once instead: half the memory, no work in the
forward pass, and the same products. Embeddings and norms work in fp32 and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from rapidformer.accel.assembly import Assembly
from rapidformer.compat.patches import Change
from rapidformer.compat.torch_modules import get_parameter_table
from rapidformer.compat.transformers_models import is_conv1d
from rapidformer.models.adapters import find_adapter


def apply(assembly: Assembly) -> str | None:
    """Drop needless casts, and round frozen linear layers if the base model's files have them."""
    model, dtype = assembly.model, assembly.precision.dtype
    adapter = find_adapter(model)
    if dtype is None or adapter is None:
        return None
    for module in model.modules():
        _keep_input(module)
    count = 0
    for parameter in find_frozen_weights(model) if adapter.base is not None else ():
        assembly.applied.plain.keep_exact(parameter, dtype)
        parameter.data = parameter.data.to(dtype)
        count += 1
    return f"{count} frozen weights in 16 bits"


def apply_adapted_layers(assembly: Assembly) -> str | None:
    """Row ``adapted layers``: torch's shortcut around layers that may have adapters is off."""
    modules = assembly.model.modules()
    has_shortcut = any(isinstance(module, nn.TransformerEncoderLayer) for module in modules)
    if find_adapter(assembly.model) is None or not has_shortcut:
        return None
    _WITHOUT_SHORTCUT.keep(assembly.applied)
    return "torch's encoder layers call their parts"


def _turn_shortcut_off() -> Callable[[], object]:
    shortcut, before = torch.backends.mha, torch.backends.mha.get_fastpath_enabled()
    shortcut.set_fastpath_enabled(False)
    return partial(shortcut.set_fastpath_enabled, before)


_WITHOUT_SHORTCUT = Change(_turn_shortcut_off)
"""In evaluation, nn.TransformerEncoderLayer passes its layers' weights to one kernel."""


def find_frozen_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """The frozen parameters that only linear layers use."""
    linear = [module for module in model.modules() if _is_linear(module)]
    others = (module for module in model.modules() if not _is_linear(module))
    # A head may be tied to the embedding, which stays in full precision.
    used_elsewhere = {id(p) for other in others for p in get_parameter_table(other).values()}
    for module in linear:
        for p in get_parameter_table(module).values():
            if p is not None and not p.requires_grad and id(p) not in used_elsewhere:
                yield p


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_conv1d(type(module))


def _keep_input(module: Any) -> None:
    """Stop peft from casting inputs to fp32: without dropout, autocast just casts them back."""
    dropouts = getattr(module, "lora_dropout", None)
    if isinstance(dropouts, nn.ModuleDict) and all(
        isinstance(dropout, nn.Identity) for dropout in dropouts.values()
    ):
        module.cast_input_dtype_enabled = False
