"""What an engine has changed, in order, each change with its undo.

Every row's ``apply`` makes its changes through ``assembly.applied``, so that closing the engine
takes them off again, last one first: the model is then the plain model, with its trained weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch.utils.hooks import RemovableHandle

from rapidformer.overlay import Build, drop_fact, extend, put_fact, remove


class Applied:
    """The changes of one engine."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def on_close(self, undo: Callable[..., Any], *args: Any) -> None:
        """Call this when the engine closes; changes made later are undone earlier."""
        self._undo.callback(undo, *args)

    def enter(self, context: AbstractContextManager[Any]) -> Any:
        """Enter a context until the engine closes."""
        return self._undo.enter_context(context)

    def extend(self, target: Any, layer: str, build: Build, **options: Any) -> None:
        """Add an overlay to an object, as ``overlay.extend`` does."""
        extend(target, layer, build, **options)
        self.on_close(remove, target, layer)

    def put_fact(self, target: Any, fact: object) -> None:
        """Keep a fact on an object, as ``overlay.put_fact`` does."""
        put_fact(target, fact)
        self.on_close(drop_fact, target, type(fact))

    def keep_hook(self, handle: RemovableHandle) -> None:
        """A hook that was registered, to be removed on closing."""
        self.on_close(handle.remove)

    def undo(self) -> None:
        """Take all changes off again, last one first."""
        self._undo.close()
