"""What a model's own loss compares each position with: its own label, or the next one."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from rapidformer.models.adapters import get_base

_LOSSES = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
"""Losses of transformers, and whether they shift the labels."""


def find_known_loss(model: Any) -> bool | None:
    """Whether the model's own loss shifts its labels; None if it is not one of ``_LOSSES``."""
    # The model's own forward may be below those of switches.
    forwards = [vars(cls)["forward"] for cls in type(model).__mro__ if "forward" in vars(cls)]
    codes = [getattr(inspect.unwrap(forward), "__code__", None) for forward in forwards]
    if not any(code is not None and "loss_function" in code.co_names for code in codes):
        return None
    # By name: models without transformers must not import it.
    function = getattr(model, "loss_function", None)
    if getattr(function, "__module__", None) != "transformers.loss.loss_utils":
        return None
    return _LOSSES.get(getattr(function, "__name__", ""))


_UNSHIFTED = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "CpmAnt", "MBart", "Marian",
        "Mvp", "PLBart", "Pegasus", "ProphetNet", "TrOCR", "Whisper",
    )
) | {"FlaubertWithLMHeadModel", "XLMWithLMHeadModel", "XLNetLMHeadModel"}  # fmt: skip
"""Named like causal language models, but each position is compared with its own label."""


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model compares each position with the *next* label; a row's first has none."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    model = get_base(model)
    known = find_known_loss(model)
    if known is not None:
        return known
    # A subclass may have any name. Without an encoder, "conditional generation" is that of a
    # multimodal decoder.
    names = [cls.__name__ for cls in type(model).__mro__]
    marks = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")
    is_causal = any(mark in name for name in names for mark in marks)
    return is_causal and _UNSHIFTED.isdisjoint(names)
