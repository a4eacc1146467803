"""Change another library for as long as we need it, and refuse one that is not as we know it.

A change is made when its first user enters and undone when its last one leaves, whatever the order
in which engines, threads and nested models do so. It is visible to the whole process meanwhile: so
what it installs asks ``is_inside`` whether the call is ours.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol, cast

PRIVATE_NAMES: dict[str, str] = {}
KNOWN = {"transformers": "5.17 to 5.22", "torch": "2.11 to 2.15"}
"""The versions whose private functions were read."""
_MISSING: Any = object()


class Entry(NamedTuple):
    """One value of another library, and what takes its place."""

    owner: Any
    """A table, a module or a class."""
    name: str
    build: Callable[[Any], Any]
    """From the value that was there (None if there was none) to ours."""


class Keeper(Protocol):
    """What holds contexts open."""

    def enter(self, context: AbstractContextManager[Any]) -> Any: ...


class Change(AbstractContextManager[None]):
    """A change of the process, made while at least one of its users is inside."""

    def __init__(self, make: Callable[[], Callable[[], object]]) -> None:
        """``make`` makes the change and returns how to undo it."""
        self._make = make
        self._lock = threading.RLock()  # an engine may be garbage-collected inside, and leave
        self._users = 0
        self._undo: Callable[[], object] | None = None
        self._depth: ContextVar[int] = ContextVar("depth", default=0)

    def is_inside(self) -> bool:
        """Whether this thread has entered it."""
        return self._depth.get() > 0

    @property
    def is_made(self) -> bool:
        """Whether anybody is inside."""
        return self._users > 0

    def __enter__(self) -> None:
        self.acquire()
        self._depth.set(self._depth.get() + 1)

    def __exit__(self, *_: object) -> None:
        self._depth.set(max(self._depth.get() - 1, 0))
        self.release()

    def keep(self, keeper: Keeper | None) -> None:
        """Stay made until the keeper (an engine's ``Applied``) closes; without one, for good."""
        if keeper is None:
            self.acquire()
        else:
            keeper.enter(self)

    def acquire(self) -> None:
        """One more user, whose calls are not looked at."""
        with self._lock:
            if not self._users:
                self._undo = self._make()
            self._users += 1

    def release(self) -> None:
        """The reverse. Sets no ContextVar: within another one's, Python 3.11 would crash.

        A garbage collection that ends an engine may run there.
        """
        with self._lock:
            self._users -= 1
            if not self._users and self._undo is not None:
                self._undo()


class Needed:
    """A fact on a module: it needs a change, and so does a copy that outlives its engine."""

    def __init__(self, change: Change) -> None:
        change.acquire()
        weakref.finalize(self, change.release).atexit = False

    def __deepcopy__(self, memo: Any) -> Needed:
        return self


class Patch(Change):
    """Values of another library that are replaced while at least one user is inside."""

    def __init__(self, list_entries: Callable[[], Iterable[Entry]]) -> None:
        """``list_entries`` is called at first use: it may import the library."""
        super().__init__(self._install)
        self._list_entries = list_entries
        self._layers: list[tuple[_Place, _Layer]] = []

    def _install(self) -> Callable[[], None]:
        if not self._layers:
            rows = self._list_entries()
            self._layers = [
                (_find_place(owner, name), _Layer(build)) for owner, name, build in rows
            ]
        try:
            for place, layer in self._layers:
                place.add(layer)
        except BaseException:
            self._restore()
            raise
        return self._restore

    def _restore(self) -> None:
        for place, layer in self._layers:
            place.remove(layer)


class _Layer:
    """What one patch makes of a value. Built once: compiled code knows it by identity."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self._build = build
        self._below = self._ours = object()

    def build_on(self, below: Any) -> Any:
        if below is not self._below:
            self._below, self._ours = below, self._build(None if below is _MISSING else below)
        return self._ours


class _Place:
    """A value of another library under the patches that are inside, the latest on top."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self._table, self.name = owner, _get_table(owner), name
        self.layers: list[_Layer] = []
        self._plain = self._top = self._get()

    def add(self, layer: _Layer) -> None:
        with _lock, without_collections():
            if self._get() is not self._top:  # somebody has replaced it since
                self._plain = self._top = self._get()
                self.layers.clear()
            self.layers.append(layer)
            self._rebuild()

    def remove(self, layer: _Layer) -> None:
        with _lock, without_collections():
            if layer in self.layers:
                self.layers.remove(layer)
                self._rebuild()

    @property
    def is_replaced(self) -> bool:
        """Whether something of ours is there."""
        return bool(self.layers) or self._get() is not self._plain

    def _get(self) -> Any:
        return self._table.get(self.name, _MISSING)

    def _rebuild(self) -> None:
        value = self._plain
        for layer in self.layers:
            value = layer.build_on(value)
        if self._get() is not self._top:
            return
        self._top = value
        if value is not _MISSING:
            self._table[self.name] = value
        elif self._get() is not _MISSING:
            del self._table[self.name]


@contextmanager
def without_collections() -> Iterator[None]:
    """No garbage is collected inside: a collection may end an engine, which removes its patches."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_places: weakref.WeakValueDictionary[tuple[int, str], _Place] = weakref.WeakValueDictionary()
"""By owner and name; those of which a patch knows."""
_lock = threading.RLock()


def _find_place(owner: Any, name: str) -> _Place:
    with _lock:
        return _places.setdefault((id(owner), name), _Place(owner, name))


class _Members:
    """A class's own attributes, as a table."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self._cls).get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._cls, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._cls, name)


def _get_table(owner: Any) -> Any:
    if isinstance(owner, type):
        return _Members(owner)
    return owner if isinstance(owner, dict) else vars(owner)


def quieten(*names: str) -> Change:
    """Inside, these loggers log errors only."""

    def set_levels(levels: dict[str, int]) -> None:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

    def make() -> Callable[[], object]:
        before = {name: logging.getLogger(name).level for name in names}
        set_levels(dict.fromkeys(names, logging.ERROR))
        return lambda: set_levels(before)

    return Change(make)


def ignore_warnings(message: str) -> Change:
    """Inside, warnings that begin like this are not shown."""

    def make() -> Callable[[], object]:
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", message=message)
        added = [row for row in warnings.filters if row not in before]

        def undo() -> None:
            filters = cast(list[Any], warnings.filters)  # others may have replaced it meanwhile
            filters[:] = [row for row in filters if row not in added]

        return undo

    return Change(make)


@contextmanager
def variables(values: Mapping[str, str], *, keeps: bool = False) -> Iterator[None]:
    """Inside, variables of the environment have values; ``keeps``: those that have none yet."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update({**values, **(before if keeps else {})})
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


def describe_difference(library: str, owner: Any, name: str, known: list[str]) -> str | None:
    """How a function differs from the one we know, with both versions; None if it does not."""
    function = getattr(owner, name, None)
    takes = list(inspect.signature(function).parameters) if callable(function) else None
    if takes == known:
        return None
    installed = "has no such function" if takes is None else f"takes ({', '.join(takes)})"
    return (
        f"{name} of {library} {version(library)} {installed}, and rapidformer knows "
        f"{name}({', '.join(known)}) of {library} {KNOWN[library]}"
    )
