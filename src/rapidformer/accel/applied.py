"""What an engine has changed, in order, each change with its undo.

``accel/parallelize.py`` applies every row inside ``applied.row(...)``, which notes what the row
changes in the model (``changes.py``). What a row changes elsewhere it registers itself, through
``assembly.applied``: a hook on a parameter, a setting of torch, a context. Closing the engine takes
everything off again, last change first; whole weights come last (``plain_weights.py``).

Nothing here may refer to the engine: a model keeps its ``Applied``, and would keep the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from rapidformer.accel.changes import Snapshot
from rapidformer.accel.plain_weights import PlainWeights
from rapidformer.errors import RapidformerError
from rapidformer.overlay import Build, drop_fact, extend, put_fact, remove


@dataclass(eq=False)
class AppliedRow:
    """One row that was applied."""

    name: str
    is_silent: bool
    line: str = ""
    """For start-up; empty if it has nothing to say."""
    changes: int = 0
    """How many entries of the model's modules it has changed."""


class Applied:
    """The changes of one engine."""

    def __init__(self, model: nn.Module | None = None, plain: PlainWeights | None = None) -> None:
        """``plain`` knows the model's weights; without it, only what is registered is undone."""
        self.rows: list[AppliedRow] = []
        self.plain = plain or PlainWeights()
        self.is_closed = False
        self._model = model if model is not None else nn.Module()
        self._undo = ExitStack()
        self._undo.callback(self.plain.restore)

    @contextmanager
    def row(self, name: str, *, is_silent: bool = False) -> Iterator[AppliedRow]:
        """Inside, what changes in the model, and what is registered here, belongs to this row."""
        row = AppliedRow(name, is_silent)
        before = Snapshot(self._model)
        outer, self._undo = self._undo, ExitStack()
        try:
            yield row
        finally:
            registered, self._undo = self._undo, outer
            changes = before.find_changes()
            row.changes = len(changes)
            self.rows.append(row)
            self._undo.callback(changes.undo)
            # Undone before that: what the row has registered, such as a hook on a parameter.
            self._undo.push(registered)

    def describe(self) -> list[str]:
        """Start-up lines; rows that are silent by nature share the last one."""
        lines = [f"{row.name}: {row.line}" for row in self.rows if row.line and not row.is_silent]
        silent = [row.name for row in self.rows if row.is_silent and (row.line or row.changes)]
        return [*lines, f"always: {', '.join(silent)}"] if silent else lines

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

    def undo(self) -> bool:
        """Take all changes off again, last one first; every rank must call this.

        False if they stay, since the whole weights do not fit into memory; a warning says so.
        """
        if not self.is_closed:
            if not self.plain.have_room():
                return False
            self.is_closed = True
            self._undo.close()
        return True

    def check_open(self) -> None:
        """Refuse to go on with an engine whose changes were taken off."""
        if self.is_closed:
            raise RapidformerError(
                "this engine is closed: engine.close() was called, or another engine has composed "
                "its model since. Use that engine, or create a new one and compose the model again."
            )
