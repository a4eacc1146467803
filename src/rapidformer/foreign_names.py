"""Names that other systems have for our settings: rows of a table, and the place where tables meet.

Nothing here names a system. ``import rapidformer`` registers who has the tables, and they are
loaded when a command line or file is first read. No dataclasses: ``import rapidformer`` is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

Outcome = Literal["mapped", "honoured", "ignored", "refused"]


class ForeignName(NamedTuple):
    """One name of another system, and what it does here."""

    outcome: Outcome
    setting: str = ""
    """Our name for it; empty if it stands for several settings or none."""
    note: str = ""
    """One sentence for the user: the difference, or the reason."""
    default: Any = None
    """What the other system takes if nothing is said."""


Table = Mapping[str, ForeignName]


def mapped(setting: str, note: str = "", *, default: Any = None) -> ForeignName:
    """The value is passed to this setting of ours unchanged."""
    return ForeignName("mapped", setting, note, default)


def honoured(note: str, setting: str = "", *, default: Any = None) -> ForeignName:
    """It means the same as there; the dialect implements it."""
    return ForeignName("honoured", setting, note, default)


def ignored(reason: str, *, default: Any = None) -> ForeignName:
    """Accepted without effect; reported once if a non-default value is given."""
    return ForeignName("ignored", "", reason, default)


def refused(reason: str) -> ForeignName:
    """An error if a non-default value is given."""
    return ForeignName("refused", "", reason)


def find_names(table: Table, outcome: Outcome) -> list[str]:
    """The names with this outcome."""
    return [name for name, row in table.items() if row.outcome == outcome]


def copy_mapped(values: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """The values of the names that are settings of ours, under our names."""
    return {
        row.setting: values[name]
        for name, row in table.items()
        if row.outcome == "mapped" and name in values
    }


class ForeignFlags(NamedTuple):
    """What a command line or a YAML file may say in other systems' words."""

    names: Table
    """Flags, which are YAML keys and attributes of the settings as well."""
    aliases: Mapping[str, str]
    """Those that are a setting of ours under another name, with its name."""
    values: Mapping[str, Mapping[str, bool | str | None]]
    """Other words for a value, by setting; None unsets it."""
    tasks: Mapping[str, Mapping[str, str]]
    """Flags whose words choose a task: flag, word, our task."""
    rewrite: Callable[[list[str], list[str]], tuple[list[str], dict[str, str]]]
    """Words of a command line -> words that the parser knows, and attributes of the settings."""
    read_file: Callable[[Mapping[str, Any], str, list[str]], Mapping[str, Any]]
    """The content of a YAML file, translated if it is another system's."""

    def find_idle(self, extras: Mapping[str, Any], task: str | None) -> list[str]:
        """Of the flags given, those that do nothing here, each with the reason."""
        has_chosen = {
            name
            for name, tasks in self.tasks.items()
            if task is not None and tasks.get(str(extras.get(name))) == task
        }
        return [
            f"--{name.replace('_', '-')} has no effect: {self.names[name].note}."
            for name in find_names(self.names, "ignored")
            if name in extras and name not in has_chosen
        ]


_loaders: list[Callable[[], ForeignFlags]] = []


def register(load: Callable[[], ForeignFlags]) -> None:
    """Say where the flags of other systems are; they are loaded when first needed."""
    _loaders[:] = [load]
    get_foreign_flags.cache_clear()


@cache
def get_foreign_flags() -> ForeignFlags:
    """Every flag of another system that is understood."""
    return _loaders[0]()
