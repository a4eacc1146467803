"""What a user's script may ask for from anywhere: the current run's arguments, timers, tokenizer.

Megatron's scripts call ``get_args()`` inside hooks that take no arguments. Only users' code uses
this room; library code takes what it needs as parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapidformer.errors import RapidformerError

if TYPE_CHECKING:
    from rapidformer.config import Settings
    from rapidformer.timers import Timers


@dataclass
class _Context:
    args: Settings | None = None
    timers: Timers | None = None
    tokenizer: Any = None
    build_tokenizer: Callable[[], Any] | None = None


_current = _Context()


def set_context(
    *,
    args: Settings,
    timers: Timers,
    build_tokenizer: Callable[[], Any] | None = None,
) -> None:
    """Make a run the current one; a later engine takes over from an earlier one."""
    _current.args, _current.timers = args, timers
    _current.tokenizer, _current.build_tokenizer = None, build_tokenizer


def replace_args(args: Settings) -> None:
    """Let the current run's arguments be these: its folder may be chosen after it has begun."""
    _current.args = args


def get_args() -> Settings:
    """The settings of the current run."""
    if _current.args is None:
        raise RapidformerError("get_args() needs an engine: call RapidformerEngine() first.")
    return _current.args


def get_timers() -> Timers:
    """The timers of the current run."""
    if _current.timers is None:
        raise RapidformerError("get_timers() needs an engine: call RapidformerEngine() first.")
    return _current.timers


def get_tokenizer() -> Any:
    """The tokenizer of the current run, made when it is first asked for."""
    if _current.tokenizer is None:
        if _current.build_tokenizer is None:
            raise RapidformerError(
                "get_tokenizer() needs an engine: call RapidformerEngine() first."
            )
        _current.tokenizer = _current.build_tokenizer()
    return _current.tokenizer
