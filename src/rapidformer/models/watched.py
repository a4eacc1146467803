"""Detect who reads the activations inside a model: hooks on blocks, ``output_hidden_states``.

If tokens are split, or blocks are on other ranks, a hook would get only a part of what it would see
in one process, and a loss computed from it would differ. A hook that only looks (a logger, a timer)
may say so: ``hook.only_looks = True``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from rapidformer.compat.torch_modules import list_global_hook_tables, list_hook_tables, list_hooks
from rapidformer.errors import list_some

ASKS_FOR_LAYERS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""What a Hugging Face model collects from every block."""
# These hooks are safe: sharding's, and those that collect what was requested by name.
_LIBRARIES = ("torch", "transformers", "deepspeed", "rapidformer")


def list_inner_modules(model: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Module]:
    """Blocks and everything inside them, by name."""
    return {
        name: module
        for block in blocks
        for name, module in model.get_submodule(block).named_modules(prefix=block)
    }


def find_watched(modules: Mapping[str, nn.Module]) -> list[str]:
    """The names of those that have a user's hook, or see one that torch runs for all modules."""
    is_everywhere = any(
        is_from_user(hook) for table in list_global_hook_tables() for hook in table.values()
    )
    return [
        name
        for name, module in modules.items()
        if is_everywhere or any(is_from_user(hook) for hook in list_hooks(module))
    ]


class Watching:
    """Asks for the watched ones of the same modules again and again: most often, none has hooks."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        tables = [table for module in modules.values() for table in list_hook_tables(module)]
        self._tables = [*tables, *list_global_hook_tables()]

    def find_watched(self) -> list[str]:
        """The names of those that have a user's hook now."""
        return find_watched(self._modules) if any(self._tables) else []


def has_width_readers(model: nn.Module) -> bool:
    """Whether a hook says that it reads a batch's width (``reads_width``), as NEFTune's does."""
    hooks = (hook for module in model.modules() for hook in list_hooks(module))
    return any(getattr(hook, "reads_width", False) for hook in hooks)


def find_requested(model: Any, kwargs: Mapping[str, Any]) -> str | None:
    """What a call requests of every block, by argument or by the model's configuration."""
    config = getattr(model, "config", None)
    for name in ASKS_FOR_LAYERS:
        asked = kwargs.get(name)
        if getattr(config, name, False) if asked is None else asked:
            return name
    return None


def find_reader(
    model: Any, kwargs: Mapping[str, Any], inner: Mapping[str, nn.Module]
) -> str | None:
    """Who reads the activations inside a model in this call: a request of it, or hooks."""
    watched = find_watched(inner)
    hooks = f"a hook on {describe_watched(watched)}" if watched else None
    return find_requested(model, kwargs) or hooks


def describe_watched(names: list[str]) -> str:
    """The first few of them."""
    return list_some(names)


def is_from_user(hook: Any) -> bool:
    """Whether a hook comes from the user's code and may change what it sees."""
    if getattr(hook, "only_looks", False):
        return False
    while isinstance(hook, functools.partial):
        hook = hook.func
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return where.partition(".")[0] not in _LIBRARIES
