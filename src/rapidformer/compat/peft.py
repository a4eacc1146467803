"""peft's adapters: switched off for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

PRIVATE_NAMES = {
    "peft.tuners.tuners_utils.BaseTunerLayer._disable_adapters": "a model without its adapters",
    "peft.tuners.tuners_utils._check_lora_target_modules_mamba": (
        "LoRA on all layers but those that it cannot adapt"
    ),
}
_IS_OFF = "_disable_adapters"
_ARE_OFF: ContextVar[bool] = ContextVar("adapters are off", default=False)


def are_adapters_off() -> bool:
    """Whether a model runs without its adapters."""
    return _ARE_OFF.get()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, adapted layers are those of the base model, and ``modules_to_save`` the originals.

    peft's own ``enable_adapters`` would also freeze the adapters, which are being trained.
    """
    adapted: list[Any] = [m for m in model.modules() if getattr(m, _IS_OFF, None) is False]
    for module in adapted:
        setattr(module, _IS_OFF, True)
    before = _ARE_OFF.set(True)
    try:
        yield
    finally:
        _ARE_OFF.reset(before)
        for module in adapted:
            setattr(module, _IS_OFF, False)


def list_refused(config: Any, model: nn.Module, names: Iterable[str]) -> list[str]:
    """The layers among these, by the ends of their names, that peft refuses to adapt."""
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba as check

    refused = []
    for name in names:
        try:
            check(config, model, name)
        except ValueError:
            refused.append(name)
    return refused
