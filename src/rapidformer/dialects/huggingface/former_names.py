"""Names of transformers 4 that transformers 5 removed, and that many scripts still use."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rapidformer.dialects.calls import check_arguments_call
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once

FORMER_NAMES = {"warmup_ratio": "warmup_steps", "evaluation_strategy": "eval_strategy"}

C = TypeVar("C")


class FormerFlag(argparse.Action):
    """On a command line of ``HfArgumentParser``, a former name sets the present one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = (option_string or "").lstrip("-").replace("-", "_")
        if name == "warmup_ratio" and not 0 <= values < 1:
            parser.error(f"--warmup_ratio must be at least 0 and below 1, got {values}.")
        is_idle = name in FORMER_NAMES and not values  # `--warmup_ratio 0.0` next to steps
        if not is_idle:
            setattr(namespace, self.dest, values)


def describe_flag(name: str) -> dict[str, Any]:
    """What ``HfArgumentParser`` must know about a field that has a former name."""
    former = [each for each, present in FORMER_NAMES.items() if present == name]
    flags = [f"--{each}" for one in former for each in (one, one.replace("_", "-"))]
    return {"aliases": flags, "action": FormerFlag} if flags else {}


def takes_former_names(cls: type[C]) -> type[C]:
    """Let a class of arguments take the former names too; its signature stays as it is."""
    build: Callable[..., None] = cls.__init__
    fields = inspect.signature(build).parameters.keys()

    @functools.wraps(build)
    def take(self: C, *positional: Any, **named: Any) -> None:
        named = _rename(named)
        check_arguments_call(named.keys() - fields)
        build(self, *positional, **named)

    cls.__init__ = take  # type: ignore[assignment]
    return cls


def _rename(named: dict[str, Any]) -> dict[str, Any]:
    renamed = {name: value for name, value in named.items() if name not in FORMER_NAMES}
    for former, name in FORMER_NAMES.items():
        value = named.get(former)
        if former == "warmup_ratio" and value is not None and not 0 <= value < 1:
            raise ConfigurationError(f"warmup_ratio must be at least 0 and below 1, got {value}.")
        if value and not renamed.get(name):  # where both are given, the present name wins
            warn_once(f"TrainingArguments({former}={value!r}) is now {name}={value!r}.")
            renamed[name] = value
    return renamed
