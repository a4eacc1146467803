"""The code of blocks: what a trial has shown holds for the parts and numbers that it runs with.

A trial cannot show what code will do after ``block.alpha = 0.1``. So its source is read for what it
depends on besides tensors, and while any of that differs, batches keep their padding. Code that
cannot be judged like this keeps it from the start. The same holds while another part or function
stands where there was one in the trial, be it a library's.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

from torch import nn

from rapidformer.compat.torch_modules import get_tables
from rapidformer.compat.transformers_scans import find_scans
from rapidformer.log import warn_once
from rapidformer.models.plan import find_owner
from rapidformer.models.side_effects.examination import Examination
from rapidformer.models.side_effects.host_state import CONSTANTS
from rapidformer.models.side_effects.pure_calls import is_pure
from rapidformer.models.watched import is_from_user
from rapidformer.overlay import get_own_class

_END = object()
"""No longer, no shorter: what is held is compared up to here."""


class _Parts:
    """Which modules a model's blocks are made of, and functions that replace their ``forward``."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model = model
        self._lists = {
            each: model.get_submodule(each) for each in {name.rpartition(".")[0] for name in names}
        }
        inner = [part for name in names for part in model.get_submodule(name).modules()]
        parts = [*self._lists.values(), *inner]
        self._views = [get_tables(module)[1].values() for module in parts]
        self._held = [*chain.from_iterable(self._views), _END]
        owners = [find_owner(model, name) for name in names]
        self._tables = list({id(module): vars(module) for module in (*owners, *inner)}.values())
        self._classes = list(dict.fromkeys(get_own_class(module) for module in (*owners, *inner)))
        self._scanning = [cls.forward for cls in self._classes if find_scans(cls.forward)]
        self._functions = self._list_functions()

    def has_changed(self) -> bool:
        """Whether they are others than those that were tried."""
        views = chain(*self._views, (_END,))
        are_same = all(map(operator.is_, views, self._held)) and all(
            map(operator.is_, map(self._find, self._lists), self._lists.values())
        )
        if are_same and self._list_functions() == self._functions:
            return False
        warn_once(
            "--dynamic-shape: a part of the model's blocks, or a function in place of its "
            "forward() or its scan, is not the one that was tried in compose(). Batches keep "
            "their padding while it differs.",
            is_local=True,
        )
        return True

    def _list_functions(self) -> list[Any]:
        of_classes = (cls.forward for cls in self._classes)
        scans = chain.from_iterable(map(find_scans, self._scanning))
        return [*(table.get("forward") for table in self._tables), *of_classes, *scans]

    def _find(self, name: str) -> nn.Module | None:
        try:
            return self._model.get_submodule(name)
        except AttributeError:  # it is gone
            return None


class BlockCode:
    """What blocks are made of, and what the user's own code in them depends on."""

    problem: str | None = None
    """Why that cannot be known."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model, self._names = model, names
        blocks = [model.get_submodule(name) for name in names]
        modules = [module for block in blocks for module in block.modules()]
        self._own = [m for m in modules if _is_own(get_own_class(m)) or "forward" in vars(m)]
        if not self._own:  # library code was tried for good
            return
        self._examination = Examination((), nn.ModuleList(blocks))
        effect = self._examination.effect
        if effect is not None:
            self.problem = f"{effect.place} {effect.what}".lstrip()

    def note(self) -> None:
        """What they are and depend on now is what was tried."""
        self._parts = _Parts(self._model, self._names)
        self._tried = self._read() if self._own else []

    def has_changed(self) -> bool:
        """Whether they are others now than when they were tried."""
        return self._reads_other_numbers() or self._parts.has_changed()

    def _reads_other_numbers(self) -> bool:
        now = self._read() if self._own else []
        if not self._own or now == self._tried:
            return False
        pairs = zip_longest(self._tried, now, fillvalue=("a number", None))
        name = next(new[0] for old, new in pairs if old != new)
        warn_once(
            f"--dynamic-shape: code in the model's blocks reads {name}, which has changed since "
            "compose(), where it was tried. Batches keep their padding while it differs.",
            is_local=True,
        )
        return True

    def _read(self) -> list[tuple[str, Any]]:
        held = ((name, value) for module in self._own for name, value in vars(module).items())
        numbers = [
            (f"self.{name}", _copy(value))
            for name, value in held
            if isinstance(value, (*CONSTANTS, dict, list, tuple, set)) and _is_public(name)
        ]
        return [*self._examination.read_values(), *numbers]


def _copy(value: Any) -> Any:
    """The constants in a collection, as they are now."""
    if isinstance(value, dict):
        return [(key, _copy(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [_copy(each) for each in value]
    return value if isinstance(value, CONSTANTS) else None


def _is_public(name: str) -> bool:
    """Whether it is an attribute of the user's own; torch's tables begin like this."""
    return name != "training" and not name.startswith("_")


def _is_own(cls: type[nn.Module]) -> bool:
    return is_from_user(cls) and not is_pure(cls)
