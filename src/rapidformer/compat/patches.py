"""Change another library for as long as we need it, and refuse one that is not as we know it.

A change is made when its first user enters and undone when its last one leaves, whatever the order
in which engines, threads and nested models do so. It is visible to the whole process meanwhile: so
what it installs asks ``is_inside`` whether the call is ours.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol

PRIVATE_NAMES: dict[str, str] = {}
KNOWN = {"transformers": "5.17", "torch": "2.11 to 2.13"}
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
        self._lock = threading.Lock()
        self._users = 0
        self._undo: Callable[[], object] | None = None
        self._depth: ContextVar[int] = ContextVar("depth", default=0)

    def is_inside(self) -> bool:
        """Whether this thread is one of the users."""
        return self._depth.get() > 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._undo = self._make()
            self._users += 1
        self._depth.set(self._depth.get() + 1)

    def keep(self, keeper: Keeper | None) -> None:
        """Stay inside until the keeper (an engine's ``Applied``) closes; without one, for good."""
        if keeper is None:
            self.__enter__()
        else:
            keeper.enter(self)

    def __exit__(self, *_: object) -> None:
        self._depth.set(self._depth.get() - 1)
        with self._lock:
            self._users -= 1
            if not self._users and self._undo is not None:
                self._undo()


class Patch(Change):
    """Values of another library that are replaced while at least one user is inside."""

    def __init__(self, list_entries: Callable[[], Iterable[Entry]]) -> None:
        """``list_entries`` is called at first use: it may import the library."""
        super().__init__(self._install)
        self._list_entries = list_entries
        self._entries: list[Entry] = []
        self._built: dict[int, tuple[Any, Any]] = {}
        """What was there and ours, by position. Built once: compiled code knows it by identity."""

    def _install(self) -> Callable[[], None]:
        self._entries = self._entries or list(self._list_entries())
        for position, entry in enumerate(self._entries):
            before = _read(entry)
            if position not in self._built or self._built[position][0] is not before:
                ours = entry.build(None if before is _MISSING else before)
                self._built[position] = before, ours
            _write(entry, self._built[position][1])
        return self._restore

    def _restore(self) -> None:
        for position, entry in enumerate(self._entries):
            before, ours = self._built[position]
            if _read(entry) is ours:  # else somebody has replaced it since
                _write(entry, before)


def _read(entry: Entry) -> Any:
    table = entry.owner if isinstance(entry.owner, dict) else vars(entry.owner)
    return table.get(entry.name, _MISSING)


def _write(entry: Entry, value: Any) -> None:
    if isinstance(entry.owner, dict):
        if value is _MISSING:
            del entry.owner[entry.name]
        else:
            entry.owner[entry.name] = value
    elif value is _MISSING:
        delattr(entry.owner, entry.name)
    else:
        setattr(entry.owner, entry.name, value)


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
