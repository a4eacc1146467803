"""Hooks that tests hang into models to see what each process works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def only_looking(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Say of a hook that no loss is made from what it sees: tokens may stay split for it."""
    marked: Any = hook
    marked.only_looks = True
    return hook
