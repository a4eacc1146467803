"""Megatron's names for ours: importing this adds them to ``sys.modules``, if they are missing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CONTEXT = "rapidformer.context"
_MPU = "rapidformer.dist.mpu"
_PRETRAINING = "rapidformer.data.pretraining"

# Megatron's module -> its name -> our module that has the name; a module of ours by itself is mpu.
_NAMES: dict[str, dict[str, str]] = {
    "megatron": {
        "mpu": _MPU, "get_args": _CONTEXT, "get_timers": _CONTEXT, "get_tokenizer": _CONTEXT,
    },
    "megatron.core": {"mpu": _MPU, "tensor_parallel": _MPU},
    "megatron.data": {},
    "megatron.data.gpt_dataset": {"build_train_valid_test_datasets": _PRETRAINING},
    "megatron.model": {"GPTModel": "rapidformer.models"},
    "megatron.utils": {"get_ltor_masks_and_position_ids": _PRETRAINING},
}  # fmt: skip
# For `from megatron.mpu import …` and `import megatron.mpu`.
_MODULES = ("megatron.mpu", "megatron.core.mpu")


class _Alias(ModuleType):
    """A module that looks its names up elsewhere on first use."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if self.__name__ in _MODULES:
            # torch, while it is imported, asks all modules for their __file__: too early for ours.
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(importlib.import_module(_MPU), name)
        names = _NAMES[self.__name__]
        if name not in names:
            child = sys.modules.get(f"{self.__name__}.{name}")
            if child is not None:
                return child
            raise AttributeError(
                f"Megatron is not installed, and our {self.__name__} has only "
                f"{', '.join(names) or 'nothing'}, not {name}"
            )
        module = importlib.import_module(names[name])
        return module if names[name] == _MPU else getattr(module, name)


def provide_megatron_names() -> None:
    """Make Megatron's names importable, unless Megatron itself is."""
    if "megatron" not in sys.modules and importlib.util.find_spec("megatron") is None:
        sys.modules |= {name: _Alias(name) for name in (*_NAMES, *_MODULES)}


provide_megatron_names()
