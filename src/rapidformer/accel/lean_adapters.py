"""Frozen weights under mixed precision: no casts that autocast would undo or repeat.

Autocast rounds a matrix to 16 bits for every product, and keeps the rounded copy only of trained
ones. A frozen matrix of a linear layer can be rounded once instead: half the memory, no work in the
forward pass, and the same products. Embeddings and norms work in fp32 and stay. In prediction, all
matrices are frozen: those that were in 16 bits in their files are so again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rapidformer.accel.assembly import Assembly
from rapidformer.compat.torch_modules import get_parameter_table
from rapidformer.compat.transformers_models import is_conv1d
from rapidformer.models.adapters import call_adapted_layers, find_adapter


def apply(assembly: Assembly) -> str | None:
    """Drop needless casts, and round frozen linear layers if the base model's files have them."""
    model, dtype = assembly.model, assembly.precision.dtype
    adapter = find_adapter(model)
    if dtype is None or adapter is None:
        return None
    drop_casts(model)
    count = 0
    for parameter in find_frozen_weights(model) if adapter.base is not None else ():
        assembly.applied.plain.keep_exact(parameter, dtype)
        parameter.data = parameter.data.to(dtype)
        count += 1
    return f"{count} frozen weights in 16 bits"


def drop_casts(model: nn.Module) -> None:
    """Keep peft from casting inputs to fp32: without dropout, autocast just casts them back."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        dropouts = getattr(module, "lora_dropout", None)
        if isinstance(dropouts, nn.ModuleDict) and all(
            isinstance(dropout, nn.Identity) for dropout in dropouts.values()
        ):
            module.cast_input_dtype_enabled = False


def apply_in_prediction(assembly: Assembly) -> str | None:
    """Row ``lean prediction``: round what loses nothing by that."""
    dtype, count = assembly.precision.dtype, 0
    assert dtype is not None
    for parameter in _find_linear_weights(assembly.model):
        if parameter.is_meta:
            continue
        rounded = parameter.detach().to(dtype)
        if torch.equal(rounded.to(parameter.dtype), parameter):
            parameter.data = rounded
            count += 1
    return f"{count} weights in 16 bits" if count else None


def apply_adapted_layers(assembly: Assembly) -> str | None:
    """Row ``adapted layers``: torch's shortcut around layers that may have adapters is off."""
    if find_adapter(assembly.model) is None or not call_adapted_layers(assembly.model):
        return None
    return "torch's encoder layers call their parts"


def find_frozen_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """The frozen parameters that only linear layers use."""
    return (parameter for parameter in _find_linear_weights(model) if not parameter.requires_grad)


def _find_linear_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    linear = [module for module in model.modules() if _is_linear(module)]
    others = (module for module in model.modules() if not _is_linear(module))
    # A head may be tied to the embedding, which stays in full precision.
    used_elsewhere = {id(p) for other in others for p in get_parameter_table(other).values()}
    for module in linear:
        for p in get_parameter_table(module).values():
            if p is not None and id(p) not in used_elsewhere:
                yield p


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_conv1d(type(module))
