"""What Python code can see of a model: a graph is valid while none of it has changed.

A replay runs no Python. Whatever a forward pass may read (an attribute, an entry of a
configuration, an item of a list, which function or part stands where) could have changed since it
was recorded. So nothing is guessed about what is read: everything that modules hold is watched. A
look compares which objects are held; their values are compared only if one is another. Values of
weights change in training: a graph reads them where they are (``hash_places``).
"""

from __future__ import annotations

import operator
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import is_dataclass
from itertools import chain, zip_longest
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from rapidformer.compat.torch_modules import WEIGHT_TABLES
from rapidformer.overlay import FACTS

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type)
_COLLECTIONS = (dict, list, tuple, set, frozenset)
_WATCHED_ELSEWHERE = {FACTS, *(name for name in vars(nn.Module()) if "hook" in name)}
"""Our own notes, and hooks, which are refused rather than recorded."""
_MOST_ITEMS = 1000
"""Of a longer collection (a vocabulary), only its identity is watched."""

_END = (object(),)
"""No longer, no shorter: what is held is compared up to here."""


class _Same(NamedTuple):
    """An object by its identity, kept so that no other one gets its id."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


Items = tuple[tuple[str, Any], ...]


class HostState:
    """What a model's modules hold, with all that is in their collections and configurations."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._views: list[Iterable[Any]] = []
        """What every object and collection holds; they follow its changes."""
        self._held: list[Any] = [None]
        """What they held at the last look."""
        self._numbers: dict[Items, int] = {}
        self._number = 0

    def describe(self) -> int:
        """A number that stands for the current state; the same state has the same number."""
        if not all(map(operator.is_, chain.from_iterable((*self._views, _END)), self._held)):
            items = self._read()
            self._number = self._numbers.setdefault(items, len(self._numbers))
        return self._number

    def find_changing(self, before: int, now: int) -> str:
        """The name of what differs between two results of ``describe``."""
        states = list(self._numbers)
        pairs = zip_longest(states[before], states[now], fillvalue=("what the model holds", None))
        return next((new[0] for old, new in pairs if old != new), "")

    def _read(self) -> Items:
        """All names and values; what holds them is found anew."""
        self._views = []
        items: list[tuple[str, Any]] = []
        seen: set[int] = set()
        waiting: list[tuple[str, Any]] = [("", module) for module in reversed(self._modules)]
        while waiting:
            name, holder = waiting.pop()
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            held, views = _open(holder)
            self._views += views
            is_weight = name.rpartition(".")[2] in WEIGHT_TABLES
            for key, value in held:
                path = f"{name}.{key}".lstrip(".")
                if is_open(value) and key not in _WATCHED_ELSEWHERE:
                    waiting.append((path, value))
                if isinstance(value, CONSTANTS):
                    items.append((path, (type(value), value)))
                elif is_open(value) and not isinstance(value, nn.Module):
                    items.append((path, type(value)))  # what it holds follows
                elif is_weight or not isinstance(value, torch.Tensor):
                    items.append((path, _Same(value)))
        # An activation that a module holds is not kept alive by us: another look is made instead.
        held_now = chain.from_iterable(self._views)
        self._held = [*(None if is_activation(each) else each for each in held_now), *_END]
        return tuple(items)


def is_open(value: Any) -> bool:
    """Whether what an object holds is watched, and not only which object it is."""
    if isinstance(value, _COLLECTIONS):
        return len(value) <= _MOST_ITEMS
    return isinstance(value, nn.Module) or _is_record(value)


def is_activation(value: Any) -> bool:
    """Whether it is a tensor that keeps a graph of autograd alive."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def is_watched(value: Any) -> bool:
    """Whether nothing about a value that a module holds can change unseen."""
    return isinstance(value, (*CONSTANTS, *_CODE, torch.Tensor)) or is_open(value)


def is_configuration(value: Any) -> bool:
    """Whether it is a configuration of transformers."""
    modules = {cls.__module__ for cls in type(value).__mro__}
    names = {"transformers.configuration_utils", "transformers.generation.configuration_utils"}
    return not modules.isdisjoint(names)


def _is_record(value: Any) -> bool:
    """Whether it only holds values: a configuration, a dataclass, a namespace."""
    is_ours = type(value).__module__.partition(".")[0] == "rapidformer"
    is_plain = isinstance(value, (Namespace, SimpleNamespace)) or is_dataclass(value)
    is_plain = (is_plain or is_configuration(value)) and not isinstance(value, type)
    return is_plain and not is_ours and hasattr(value, "__dict__")


def _open(holder: Any) -> tuple[Iterable[tuple[Any, Any]], list[Iterable[Any]]]:
    """The names and values that an object holds, and views of all that may change in it."""
    if isinstance(holder, dict):
        return holder.items(), [holder, holder.values()]
    if isinstance(holder, _COLLECTIONS):
        return enumerate(holder), [holder]
    return vars(holder).items(), [vars(holder).values()]
