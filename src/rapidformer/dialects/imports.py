"""The import line for arguments in another dialect's words than those of the class they reach.

``from rapidformer import Trainer`` is Hugging Face's. A script with FlagAI's or MindFormers'
arguments gets an error with the line to copy, instead of a list of names that do not exist.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rapidformer.dialects.flagai.names import FLAGAI
from rapidformer.dialects.mindformers.names import TRAINER, TRAINING_ARGUMENTS
from rapidformer.errors import ConfigurationError

_FLAGAI = "rapidformer.dialects.flagai"
MINDFORMERS = "rapidformer.dialects.mindformers"


def check_trainer_call(
    build: Callable[..., None], model: Any, args: Any, others: Mapping[str, Any], *, room: str
) -> None:
    """Refuse arguments that Hugging Face's trainer does not have; ``others`` are unknown names."""
    # MindFormers' arguments come before the task; a model may be a name, and `args` its YAML file.
    is_named = isinstance(model, (str, Path)) or isinstance(args, (str, Path))
    is_theirs = any(getattr(each, "room", room) == MINDFORMERS != room for each in (model, args))
    if is_named or is_theirs or others.keys() & TRAINER.keys():
        _refuse(others.keys() & TRAINER.keys(), "MindFormers' Trainer", MINDFORMERS, "Trainer")
    if model is None and args is None and others.keys() & FLAGAI.keys():
        _refuse(others.keys() & FLAGAI.keys(), "FlagAI's Trainer", _FLAGAI, "Trainer")
    if others:
        known = inspect.signature(build).parameters
        raise ConfigurationError([describe_unknown("Trainer", name, known) for name in others])


def check_arguments_call(names: Iterable[str]) -> None:
    """Refuse names that only MindFormers' ``TrainingArguments`` has."""
    if theirs := set(names) & TRAINING_ARGUMENTS.keys():
        _refuse(theirs, "MindFormers' TrainingArguments", MINDFORMERS, "TrainingArguments")


def describe_unknown(function: str, name: str, known: Iterable[str]) -> str:
    """A name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f": did you mean {near[0]!r}?" if near else "."
    return f"{function} has no argument {name!r}{hint}"


def _refuse(names: Iterable[str], owner: str, room: str, name: str) -> None:
    listed = ", ".join(sorted(names))
    what = f"{listed}: an argument of {owner}" if listed else f"the arguments are {owner}'s"
    if "," in listed:
        what = f"{listed}: arguments of {owner}"
    raise ConfigurationError(f"{what}. Write `from {room} import {name}`.")
