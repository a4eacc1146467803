"""Which system's words a ``Trainer`` was given, and the class that understands them.

Hugging Face's is ``Trainer`` itself. Another dialect is a subclass of it; an instance takes that
class on (a user's own subclass stays in front of it), so that scripts need no other import.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rapidformer.dialects.flagai.names import FLAGAI
from rapidformer.errors import ConfigurationError

# Names that both have; they decide nothing.
_SHARED = frozenset({"tokenizer"})


class Dialect(NamedTuple):
    """How a system's arguments are recognised, and where its class is."""

    recognises: Callable[[tuple[Any, ...], Mapping[str, Any]], bool]
    module: str
    name: str


def _is_flagai(positional: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """FlagAI's trainer is given names alone, none of which is a model."""
    words = set(named) - _SHARED
    return not positional and bool(words & set(FLAGAI)) and not words & {"model", "args"}


def _is_mindformers(positional: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """MindFormers' trainer has a task, or a model by name; its arguments come before the task."""
    own = ("task", "model_name", "pet_method", "wrapper", "save_config", "eval_callbacks")
    has_name = isinstance(named.get("model"), str)
    is_second = len(positional) > 1 and isinstance(positional[1], str)
    arguments = named.get("args", positional[0] if positional else None)
    is_argument = type(arguments).__name__ == "MindFormersArguments"
    is_argument |= isinstance(arguments, (str, Path))  # its YAML file
    return has_name or is_second or is_argument or any(name in named for name in own)


DIALECTS: list[Dialect] = [
    Dialect(_is_mindformers, "rapidformer.dialects.mindformers.trainer", "MindFormersTrainer"),
    Dialect(_is_flagai, "rapidformer.dialects.flagai.trainer", "FlagAITrainer"),
]


def take_on_dialect(trainer: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Make the trainer one of the dialect of its arguments; Hugging Face's it is already."""
    for dialect in DIALECTS:
        if dialect.recognises(positional, named):
            cls = getattr(importlib.import_module(dialect.module), dialect.name)
            own = type(trainer)
            if not issubclass(own, cls):
                # The public class itself gives way; a user's subclass stays in front.
                is_public = issubclass(cls, own)
                trainer.__class__ = cls if is_public else _join(own, cls)
            return


def check_names(function: Callable[..., Any], named: Mapping[str, Any]) -> None:
    """Say every name that does not exist, each with the nearest one that does."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    problems = []
    for name in named:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f": did you mean {near[0]!r}?" if near else "."
            problems.append(f"Trainer has no argument {name!r}{hint}")
    if problems:
        raise ConfigurationError(problems)


def _join(own: type, cls: type) -> type:
    """The user's class in front of the dialect's, under the user's name."""
    return type(own.__name__, (own, cls), {"__module__": own.__module__, "__doc__": own.__doc__})
