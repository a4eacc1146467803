"""What an engine has changed, in order, each change with its undo.

A row may change classes, hooks, facts, attributes and configurations of a model, through other
libraries too, so nobody lists them: the model is compared before and after. What a row changes
elsewhere (a hook on a parameter, a setting of torch) it registers itself. Closing takes everything
off again, last change first, whole weights last; what the user has changed since stays.

Nothing here may refer to the engine: a model keeps its ``Applied``, and would keep the engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rapidformer.accel.plain_weights import PlainWeights
from rapidformer.compat.patches import Change
from rapidformer.compat.torch_modules import WEIGHT_TABLES
from rapidformer.config.switches import get_switch
from rapidformer.errors import RapidformerError
from rapidformer.overlay import return_to

_MISSING: Any = object()
_WEIGHTS = frozenset(WEIGHT_TABLES)


@dataclass(eq=False)
class AppliedRow:
    """One row that was applied."""

    name: str
    is_silent: bool
    line: str = ""
    """For start-up; empty if it has nothing to say."""
    changes: int = 0
    """How many entries of the model's modules it has changed."""
    is_part: bool = False
    """Whether another row's module, or the engine, has applied it."""
    find_obstacle: Callable[[], str | None] = lambda: None
    """Why it has no effect now; None while it has."""

    @property
    def has_effect(self) -> bool:
        """Whether it has changed anything, and still does."""
        is_found = self.is_part or bool(self.line) or self.changes > 0
        return is_found and self.find_obstacle() is None


class Applied:
    """The changes of one engine."""

    def __init__(self, model: nn.Module | None = None, plain: PlainWeights | None = None) -> None:
        """``plain`` knows the model's weights; without it, only what is registered is undone."""
        self.rows: list[AppliedRow] = []
        self.plain = plain or PlainWeights()
        self.is_closed = False
        self.changes: list[tuple[Any, partial[Any]]] = []
        """Modules and configurations that rows have changed, each with the undo of one change."""
        self.hooks: list[RemovableHandle] = []
        """Those that were registered besides."""
        self._model = model if model is not None else nn.Module()
        self._current: AppliedRow | None = None
        self._looks: dict[int, _Look] | None = None
        """After the row before, by the owner's id, while rows follow each other."""
        self._contexts: list[weakref.finalize[..., Any]] = []
        """The exits of those that were entered."""
        self._undo = ExitStack()
        self._undo.callback(self.plain.restore)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Inside, only rows change the model: what one has left is what the next one finds."""
        self._looks = {}
        try:
            yield
        finally:
            self._looks = None

    @contextmanager
    def row(self, name: str, *, is_silent: bool = False) -> Iterator[AppliedRow]:
        """Inside, what changes in the model, and what is registered here, belongs to this row."""
        row = self._current = AppliedRow(name, is_silent)
        known = self._looks or {}
        before = [known.get(id(owner)) or _Look(owner) for owner in _list_owners(self._model)]
        outer, self._undo = self._undo, ExitStack()
        try:
            yield row
        finally:
            registered, self._undo = self._undo, outer
            for number, look in enumerate(before):
                undos = list(look.find_changes())
                row.changes += len(undos)
                for undo in undos:
                    self._undo.callback(undo)
                    self.changes.append((look.owner, undo))
                if undos and self._looks is not None:
                    before[number] = _Look(look.owner)
            if self._looks is not None:
                self._looks = {id(look.owner): look for look in before}
            self.rows.append(row)
            # Undone before that: what the row has registered, such as a hook on a parameter.
            self._undo.push(registered)

    @property
    def current(self) -> AppliedRow:
        """The row that is being applied."""
        assert self._current is not None
        return self._current

    def leave_off(self, obstacle: str) -> None:
        """The row that is being applied has no effect on this model, for this reason."""
        self.current.find_obstacle = lambda: obstacle

    def add_part(self, name: str) -> None:
        """A row without a module of its own was applied, by another row's or by the engine."""
        is_silent = get_switch(name).kind == "always"
        self.rows.append(AppliedRow(name, is_silent, is_part=True))

    def get_row(self, name: str) -> AppliedRow:
        """The row of this name, which was applied."""
        return next(row for row in self.rows if row.name == name)

    def describe(self) -> list[str]:
        """Start-up lines; parts of other rows and rows that are silent by nature share one each."""
        obstacles = {row: row.find_obstacle() for row in self.rows}
        lines = [
            f"{row.name}: " + (f"off, since {obstacle}" if obstacle else row.line)
            for row, obstacle in obstacles.items()
            if (obstacle if row.is_silent else row.line)
        ]
        working = [row for row in self.rows if row.has_effect]
        shared = {
            "included": [row.name for row in working if row.is_part and not row.is_silent],
            "always": [row.name for row in working if row.is_silent],
        }
        return [*lines, *(f"{what}: {', '.join(names)}" for what, names in shared.items() if names)]

    def on_close(self, undo: Callable[..., Any], *args: Any) -> None:
        """Call this when the engine closes; changes made later are undone earlier."""
        self._undo.callback(undo, *args)

    def enter(self, context: AbstractContextManager[Any]) -> Any:
        """Enter a context until the engine closes, or is dropped without that."""
        value: Any = None
        if isinstance(context, Change):
            context.acquire()
            leave: weakref.finalize[..., Any] = weakref.finalize(self, context.release)
        else:
            value = context.__enter__()
            leave = weakref.finalize(self, context.__exit__, None, None, None)
        leave.atexit = False
        self._contexts.append(leave)
        self._undo.callback(leave)
        return value

    def leave_contexts(self) -> None:
        """Leave them alone: the model stays as it is, and nobody calls it any more."""
        while self._contexts:
            self._contexts.pop()()

    def keep_hook(self, handle: RemovableHandle) -> None:
        """A hook that was registered, to be removed on closing."""
        self.hooks.append(handle)
        self.on_close(handle.remove)

    def undo(self) -> bool:
        """Take all changes off again, on every rank; False, with a warning, if memory is short."""
        if not self.is_closed:
            if not self.plain.have_room():
                return False
            self.is_closed = True
            self._undo.close()
            self.changes, self.hooks = [], []
        return True

    def check_open(self) -> None:
        """Refuse to go on with an engine whose changes were taken off."""
        if self.is_closed:
            raise RapidformerError(
                "this engine is closed: engine.close() was called, or another engine has composed "
                "its model since. Use that engine, or create a new one and compose the model again."
            )


class _Look:
    """A module or a configuration as it is now; weights are not looked at."""

    def __init__(self, owner: Any) -> None:
        self.owner, self._cls = owner, type(owner)
        self._values = vars(owner).copy()
        # Tables and sets are changed in place.
        self._tables = [
            (name, value, value.copy())
            for name, value in self._values.items()
            if isinstance(value, (dict, set)) and name not in _WEIGHTS
        ]

    def find_changes(self) -> Iterator[partial[Any]]:
        """What undoes each change since."""
        if type(self.owner) is not self._cls:
            yield partial(return_to, self.owner, self._cls)
        now = vars(self.owner)
        yield from self._undo_each("", now, self._values)
        for name, table, before in self._tables:
            # If the table itself was replaced, its own line puts the old one back.
            if (table or before) and now.get(name) is table:
                yield from self._undo_each(name, table, before)

    def _undo_each(self, name: str, table: Any, before: Any) -> Iterator[partial[Any]]:
        """By owner and name: torch.export gives modules new tables with the same items."""
        for key, old, new in _compare(table, before):
            yield partial(_put_back, self.owner, name, key, old, new)


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


def _compare(table: Any, before: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What has changed in a table or a set since it was copied: keys, with old and new values.

    The copy follows tensors.
    """
    if isinstance(table, set):
        yield from ((key, _MISSING, key) for key in table - before)
        yield from ((key, key, _MISSING) for key in before - table)
        return
    # Nearly always; a thousand tables are compared for every row.
    has_same_names = len(table) == len(before) and all(map(is_, table, before))
    if has_same_names and all(map(is_, table.values(), before.values())):
        return
    for key in [*before, *(key for key in table if key not in before)]:
        old, new = before.get(key, _MISSING), table.get(key, _MISSING)
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            before[key] = new  # moved or filled in: it is the model's own
        elif old is not new and key not in _WEIGHTS:
            yield key, old, new


def _put_back(owner: Any, name: str, key: Any, before: Any, after: Any) -> None:
    """Undo a change of an attribute or, with a ``name``, of an item of that table."""
    table = vars(owner).get(name) if name else vars(owner)
    if isinstance(table, set):
        (table.discard if before is _MISSING else table.add)(key)
    elif table is None or not _is_same(table.get(key, _MISSING), after):
        return  # the user's
    elif before is _MISSING:
        del table[key]
    else:
        table[key] = before


def _is_same(now: Any, after: Any) -> bool:
    """Also a copy with the same items: torch.export gives modules new lists and dictionaries."""
    if now is after or type(now) is not type(after):
        return now is after
    if isinstance(now, dict):
        return list(now) == list(after) and all(map(_is_same, now.values(), after.values()))
    if isinstance(now, (list, tuple)):
        return len(now) == len(after) and all(map(_is_same, now, after))
    return False
