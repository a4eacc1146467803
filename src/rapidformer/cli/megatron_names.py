"""``from megatron import mpu`` in a user's script, on a machine without Megatron.

Scripts written for Megatron import a few of its names. If Megatron is not installed, they get ours,
which do the same; if it is, nothing changes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CONTEXT = "rapidformer.context"
_MPU = "rapidformer.dist.mpu"
_LTOR = ("rapidformer.data.pretraining", "get_ltor_masks_and_position_ids")
_GPT_DATA = ("rapidformer.data.pretraining", "build_train_valid_test_datasets")
_GPT_MODEL = ("rapidformer.models", "GPTModel")

# Megatron's module -> its name -> (our module, our name; None for the module itself)
_NAMES: dict[str, dict[str, tuple[str, str | None]]] = {
    "megatron": {
        "mpu": (_MPU, None),
        "get_args": (_CONTEXT, "get_args"),
        "get_timers": (_CONTEXT, "get_timers"),
        "get_tokenizer": (_CONTEXT, "get_tokenizer"),
    },
    "megatron.core": {"mpu": (_MPU, None), "tensor_parallel": (_MPU, None)},
    "megatron.data": {},
    "megatron.data.gpt_dataset": {"build_train_valid_test_datasets": _GPT_DATA},
    "megatron.model": {"GPTModel": _GPT_MODEL},
    "megatron.utils": {"get_ltor_masks_and_position_ids": _LTOR},
}


class _Alias(ModuleType):
    """A module that looks its names up elsewhere on first use."""

    def __init__(self, name: str, names: dict[str, tuple[str, str | None]]) -> None:
        super().__init__(name)
        self._names = names
        self.__path__: list[str] = []
        # Without a spec, importlib's find_spec("megatron") would raise an error.
        self.__spec__ = ModuleSpec(name, loader=None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        where = self.__dict__.get("_names", {}).get(name)
        if where is None:
            known = ", ".join(self.__dict__.get("_names", ())) or "nothing"
            raise AttributeError(
                f"Megatron is not installed, and our {self.__name__} has only {known}, not {name}"
            )
        module = importlib.import_module(where[0])
        return module if where[1] is None else getattr(module, where[1])


def provide_megatron_names() -> None:
    """Make Megatron's names importable, unless Megatron itself is installed."""
    if "megatron" in sys.modules or importlib.util.find_spec("megatron") is not None:
        return
    for name, names in _NAMES.items():
        sys.modules[name] = alias = _Alias(name, names)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, alias)
    # Also for `from megatron.mpu import …` and `import megatron.mpu`.
    mpu = importlib.import_module(_MPU)
    sys.modules["megatron.mpu"] = sys.modules["megatron.core.mpu"] = mpu
