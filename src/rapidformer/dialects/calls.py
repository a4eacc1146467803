"""What the dialects share: the names of a call checked by a table, and the launcher's flags.

``from rapidformer import Trainer`` is Hugging Face's. A script with FlagAI's or MindFormers'
arguments gets an error with the import line to copy, not a list of names that do not exist.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakSet

from rapidformer.config import Settings, parse_arguments
from rapidformer.dialects.flagai.names import FLAGAI
from rapidformer.dialects.mindformers.names import TRAINER, TRAINING_ARGUMENTS
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.foreign_names import Table
from rapidformer.log import warn_once
from rapidformer.nearest import find_nearest

_FLAGAI = "rapidformer.dialects.flagai"
MINDFORMERS = "rapidformer.dialects.mindformers"
_PACKAGE = Path(__file__).parents[1]
_FLAG = re.compile(r"--([a-z][a-z0-9-]*[a-z0-9])")
Verb = TypeVar("Verb", bound=Callable[..., Any])


def in_words_of(*tables: Table) -> Callable[[Verb], Verb]:
    """Errors of a verb name the dialect's arguments, and uncaught ones only the script's line."""
    rows = [(row.setting, name) for table in tables for name, row in table.items() if row.setting]
    words = dict(reversed(rows))  # the first name of a setting

    def name_flag(flag: re.Match[str]) -> str:
        return words.get(flag[1].replace("-", "_"), flag[0])

    def decorate(verb: Verb) -> Verb:
        @functools.wraps(verb)
        def call(*args: Any, **named: Any) -> Any:
            try:
                return verb(*args, **named)
            except RapidformerError as error:
                error.args = (_FLAG.sub(name_flag, str(error)),)
                _PLAIN.add(error)
                _install_hook()
                raise

        return cast(Verb, call)

    return decorate


_PLAIN: WeakSet[BaseException] = WeakSet()
"""Errors that end a script with a sentence and its line, not with a traceback."""


def _install_hook() -> None:
    """Once, and only in a process that has such an error."""
    before = sys.excepthook
    if before.__module__ == __name__:
        return

    def show(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if value not in _PLAIN:
            before(kind, value, trace)
            return
        frames = traceback.extract_tb(trace)
        theirs = list(takewhile(lambda one: _PACKAGE not in Path(one.filename).parents, frames))
        place = f"{theirs[-1].filename}, line {theirs[-1].lineno}: " if theirs else ""
        sys.stderr.write(f"error: {place}{value}\n")

    sys.excepthook = show


def check_names(
    function: str, values: Mapping[str, Any], table: Table, problems: list[str]
) -> None:
    """Report names that do not exist or are refused, and warn of those that do nothing."""
    for name, value in values.items():
        row = table.get(name)
        if row is None:
            problems.append(describe_unknown(function, name, table))
        elif row.outcome == "refused" and value:
            problems.append(f"{function}({name}={value!r}) is not supported: {row.note}.")
        elif row.outcome == "ignored" and value not in (row.default, None):
            warn_once(f"{function}({name}=...) has no effect: {row.note}.")


def describe_unknown(function: str, name: str, known: Iterable[str]) -> str:
    """A name that does not exist, with the nearest one that does."""
    near = find_nearest(name, known)
    hint = f": did you mean {near!r}?" if near else "."
    return f"{function} has no argument {name!r}{hint}"


def flatten(
    values: Mapping[str, Any], separator: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The entries of nested dictionaries, under their names joined."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, separator, f"{prefix}{name}{separator}")
        else:
            yield f"{prefix}{name}", value


def add_launch_flags(settings: Settings, said: Iterable[str] = ()) -> Settings:
    """The settings with the flags of `rapidformer launch`, except for what the script has said."""
    launched = parse_arguments([])
    flags = {name: getattr(launched, name) for name in launched.sources if name not in set(said)}
    return settings.replace("command line", **flags)


def check_trainer_call(
    build: Callable[..., None], model: Any, args: Any, others: Mapping[str, Any], *, room: str
) -> None:
    """Refuse arguments that Hugging Face's trainer does not have; ``others`` are unknown names."""
    # MindFormers' arguments come before the task; a model may be a name, and `args` its YAML file.
    is_named = isinstance(model, (str, Path)) or isinstance(args, (str, Path))
    is_theirs = any(getattr(part, "room", room) == MINDFORMERS != room for part in (model, args))
    if is_named or is_theirs or others.keys() & TRAINER.keys():
        _refuse(others.keys() & TRAINER.keys(), "MindFormers' Trainer", MINDFORMERS, "Trainer")
    if model is None and args is None and others.keys() & FLAGAI.keys():
        _refuse(others.keys() & FLAGAI.keys(), "FlagAI's Trainer", _FLAGAI, "Trainer")
    if others:
        known = list(inspect.signature(build).parameters)[1:-1]
        raise ConfigurationError([describe_unknown("Trainer", name, known) for name in others])


def check_arguments_call(names: Iterable[str]) -> None:
    """Refuse names that only MindFormers' ``TrainingArguments`` has."""
    if theirs := set(names) & TRAINING_ARGUMENTS.keys():
        _refuse(theirs, "MindFormers' TrainingArguments", MINDFORMERS, "TrainingArguments")


def _refuse(names: Iterable[str], owner: str, room: str, name: str) -> None:
    listed = ", ".join(sorted(names)) or "what was given"
    raise ConfigurationError(f"{listed}: that is for {owner}. Write `from {room} import {name}`.")
