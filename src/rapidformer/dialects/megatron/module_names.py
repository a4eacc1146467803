"""``from megatron import mpu`` in a user's script, on a machine without Megatron.

Scripts written for Megatron import a few of its names. If Megatron is not installed, they get ours,
which do the same; if it is, nothing changes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
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


# For `from megatron.mpu import …` and `import megatron.mpu`.
_MODULES = ("megatron.mpu", "megatron.core.mpu")


class _Alias(ModuleType):
    """A module that looks its names up elsewhere on first use."""

    def __init__(self, name: str, names: dict[str, tuple[str, str | None]]) -> None:
        super().__init__(name)
        self._names = names

    def __getattr__(self, name: str) -> Any:
        where = self.__dict__.get("_names", {}).get(name)
        if where is None:
            known = ", ".join(self.__dict__.get("_names", ())) or "nothing"
            raise AttributeError(
                f"Megatron is not installed, and our {self.__name__} has only {known}, not {name}"
            )
        module = importlib.import_module(where[0])
        return module if where[1] is None else getattr(module, where[1])


class _Finder(MetaPathFinder, Loader):
    """Finds our modules under Megatron's names, after everybody else has looked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _NAMES and fullname not in _MODULES:
            return None
        if fullname != "megatron" and not isinstance(sys.modules.get("megatron"), _Alias):
            return None  # Megatron itself is installed: its modules are its own
        return ModuleSpec(fullname, self, is_package=fullname in _NAMES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name, _NAMES.get(spec.name, {}))

    def exec_module(self, module: ModuleType) -> None:
        """A module of ours takes the place; other names are looked up when they are used."""
        if module.__name__ in _MODULES:
            sys.modules[module.__name__] = importlib.import_module(_MPU)


def provide_megatron_names() -> None:
    """Make Megatron's names importable; where Megatron itself is installed, it is found first."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
