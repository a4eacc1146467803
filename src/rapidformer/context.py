"""What users' scripts may ask for from anywhere; library code takes what it needs as parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rapidformer.errors import RapidformerError

if TYPE_CHECKING:
    from rapidformer.config.settings import Settings
    from rapidformer.timers import Timers

T = TypeVar("T")


@dataclass
class _Context:
    args: Settings | None = None
    timers: Timers | None = None
    tokenizer: Any = None
    build_tokenizer: Callable[[], Any] | None = None
    is_started: bool = False
    was_read: tuple[list[str], Settings] | None = None


_current = _Context()


def set_context(
    *, args: Settings, timers: Timers, build_tokenizer: Callable[[], Any] | None = None
) -> None:
    """Make a run the current one; a later engine replaces an earlier one."""
    _current.args, _current.timers = args, timers
    _current.tokenizer, _current.build_tokenizer = None, build_tokenizer


def replace_args(args: Settings) -> None:
    """Replace the current run's settings: its folder may be chosen after it has started."""
    _current.args = args


def mark_as_started(was_read: tuple[list[str], Settings] | None = None) -> None:
    """The command runs a script: its command line is meant for us, and may have been read."""
    _current.is_started, _current.was_read = True, was_read


def is_started() -> bool:
    """Whether the command has started this process's script."""
    return _current.is_started


def get_settings_of(words: list[str]) -> Settings | None:
    """The settings of a command line that was read before this process's script was started."""
    return _current.was_read[1] if _current.was_read and _current.was_read[0] == words else None


def get_args() -> Settings:
    """The settings of the current run."""
    return _need(_current.args, "get_args")


def get_timers() -> Timers:
    """The timers of the current run."""
    return _need(_current.timers, "get_timers")


def get_tokenizer() -> Any:
    """The tokenizer of the current run, created on first use."""
    if _current.tokenizer is None:
        _current.tokenizer = _need(_current.build_tokenizer, "get_tokenizer")()
    return _current.tokenizer


def _need(value: T | None, name: str) -> T:
    if value is None:
        raise RapidformerError(f"{name}() needs an engine: call RapidformerEngine() first.")
    return value
