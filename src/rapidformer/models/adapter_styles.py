"""How the adapters of a split layer are split: the layer's style, moved to the modules inside it.

A LoRA layer computes ``W x + B (A x)``. If ``W`` is split by outputs, so is ``B``, and ``A`` stays
whole; if ``W`` is split by inputs, so is ``A``, and ``B`` stays whole. The narrow product ``A x``
is whole on every rank in both cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from rapidformer.errors import ConfigurationError

WHOLE = "whole"
_FLAG = "--tensor-model-parallel-size"
_INNER = ("base_layer", "original_module", "modules_to_save", "lora_A", "lora_B")
# Styles that split a layer's inputs; all others split its outputs, or nothing.
_BY_INPUTS = ("rowwise", "rowwise_split_input")
# A strided slice of the first dimension would be sharded in the wrong order: B is small, so it
# stays whole, and each rank reads its own rows.
_STYLES_OF_B = {"fused_qkv": "whole_fused_qkv", "fused_kv": "whole_fused_kv"}


def spread_styles(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """The styles, with those of layers that have adapters given to the modules inside them."""
    spread: dict[str, str] = {}
    for name, style in styles.items():
        spread |= dict(_spread(name, model.get_submodule(name), style))
    return spread


def get_layer_name(name: str) -> str:
    """The name of the layer that a module is a part of: ``q_proj`` for ``q_proj.lora_B.default``"""
    parts = name.split(".")
    inner = [i for i, part in enumerate(parts) if part in _INNER]
    return ".".join(parts[: inner[0]]) if inner else name


def find_unsplittable(model: nn.Module) -> Iterator[str]:
    """Adapters that replace a parameter while its module runs; a slice cannot be replaced."""
    for name, module in model.named_modules():
        if has_adapter(module) and type(module).__name__ == "ParamWrapper":
            yield (
                f"{_FLAG} cannot split the adapter of {name}, which changes a parameter instead of "
                "a layer (a router or experts): leave it out of --lora-target-modules or "
                "target_parameters, or use --zero-3-memory-optimization instead."
            )


def has_adapter(module: nn.Module) -> bool:
    """Whether a layer is one of peft's, with the model's own layer inside."""
    # By attributes: a run without adapters must not import peft.
    return hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")


def _spread(name: str, module: Any, style: str) -> Iterator[tuple[str, str]]:
    if hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
        yield f"{name}.original_module", style
        for key in module.modules_to_save:
            yield f"{name}.modules_to_save.{key}", style
        return
    if not has_adapter(module):
        yield name, style
        return
    _refuse_unknown(name, module, style)
    yield f"{name}.base_layer", style
    if style == "replicated_with_grad_allreduce":
        of_a = of_b = style
    else:
        of_a = style if style in _BY_INPUTS else WHOLE
        of_b = WHOLE if style in _BY_INPUTS else _STYLES_OF_B.get(style, style)
    for key in module.lora_A:
        yield f"{name}.lora_A.{key}", of_a
        yield f"{name}.lora_B.{key}", of_b


def _refuse_unknown(name: str, module: Any, style: str) -> None:
    """Refuse what only plain LoRA can do: its two factors are the whole adapter."""
    kind = type(module).__module__.split(".")[-2].upper()
    variants = getattr(module, "lora_variant", {})
    if kind != "LORA" or variants:
        what = "DoRA" if "Dora" in str(variants) else kind
        raise ConfigurationError(
            f"{_FLAG} cannot split the {what} adapter of {name}: use plain LoRA (--lora-rank "
            "without --use-dora), or --zero-3-memory-optimization instead."
        )
    padding = getattr(module.base_layer, "padding_idx", None)
    if style == "embedding_rowwise" and padding is not None:
        raise ConfigurationError(
            f"{_FLAG} cannot split the adapter of the embedding {name}, which has a padding row: "
            "leave it out of --lora-target-modules, or use --zero-3-memory-optimization instead."
        )
