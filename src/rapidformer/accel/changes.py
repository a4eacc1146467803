"""What a row changes in a model: the difference between two looks at it, which can be undone.

A row may change a module's class (overlays, ``fully_shard``), hooks, facts, attributes and the
values of its configuration, through other libraries too. So nobody has to list them: they are
compared before and after. What the user changes later stays: only a value that is still the one
that the row left is put back. Weights are not looked at here (``plain_weights.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rapidformer.compat.torch_modules import WEIGHT_TABLES
from rapidformer.overlay import return_to

_MISSING: Any = object()


@dataclass(frozen=True, eq=False)
class _Look:
    """An object as it is now."""

    cls: type
    values: dict[str, Any]
    contents: dict[str, Any]
    """Copies of the tables and sets among them, which are changed in place."""


@dataclass(frozen=True, eq=False)
class _Change:
    """One entry of a table, such as an object's attributes, before and after."""

    owner: Any
    key: Any
    before: Any
    after: Any

    def undo(self) -> None:
        table = vars(self.owner) if not isinstance(self.owner, (dict, set)) else self.owner
        if isinstance(table, set):
            table.discard(self.key) if self.before is _MISSING else table.add(self.key)
        elif table.get(self.key, _MISSING) is not self.after:
            return  # the user's
        elif self.before is _MISSING:
            del table[self.key]
        else:
            table[self.key] = self.before


@dataclass(frozen=True, eq=False)
class _NewClass:
    """An object's class, before and after."""

    owner: Any
    before: type
    after: type

    def undo(self) -> None:
        return_to(self.owner, self.before)


@dataclass(frozen=True, eq=False)
class Changes:
    """What one row has changed."""

    items: list[_Change | _NewClass]

    def __len__(self) -> int:
        return len(self.items)

    def undo(self) -> None:
        """Put back what is still as the row left it."""
        for item in reversed(self.items):
            item.undo()


class Snapshot:
    """All modules of a model, and their configurations, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._looks = [(owner, _look(owner)) for owner in _list_owners(model)]

    def find_changes(self) -> Changes:
        """What has changed since."""
        items: list[_Change | _NewClass] = []
        for owner, before in self._looks:
            after = _look(owner)
            if after.cls is not before.cls:
                items.append(_NewClass(owner, before.cls, after.cls))
            items += _compare(owner, before.values, after.values)
            for name, table in before.contents.items():
                # If the table itself was replaced, its own line puts the old one back.
                if after.values.get(name) is before.values[name]:
                    items += _compare(before.values[name], table, after.contents[name])
        return Changes(items)


def _list_owners(model: nn.Module) -> Iterator[Any]:
    configs: dict[int, Any] = {}
    for module in model.modules():
        yield module
        _add_configs(vars(module).get("config"), configs)
    yield from configs.values()


def _add_configs(config: Any, configs: dict[int, Any]) -> None:
    """A configuration of transformers, and those inside it."""
    if hasattr(config, "to_dict") and hasattr(config, "__dict__") and id(config) not in configs:
        configs[id(config)] = config
        for value in list(vars(config).values()):
            _add_configs(value, configs)


def _look(owner: Any) -> _Look:
    values = {name: value for name, value in vars(owner).items() if name not in WEIGHT_TABLES}
    contents = {
        name: value.copy() for name, value in values.items() if isinstance(value, (dict, set))
    }
    return _Look(type(owner), values, contents)


def _compare(owner: Any, before: Any, after: Any) -> Iterator[_Change]:
    if isinstance(before, set):
        yield from (_Change(owner, key, _MISSING, True) for key in after - before)
        yield from (_Change(owner, key, True, _MISSING) for key in before - after)
        return
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key, _MISSING), after.get(key, _MISSING)
        # A tensor that was moved or filled in is the model's own.
        if old is not new and not (isinstance(old, Tensor) and isinstance(new, Tensor)):
            yield _Change(owner, key, old, new)
