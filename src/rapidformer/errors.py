"""Errors that users can cause: what was given, what is needed, what to do; without a traceback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class RapidformerError(Exception):
    """Base class of every error that the user can fix."""


class ConfigurationError(RapidformerError, ValueError):
    """Settings that are unknown, malformed or contradictory: all problems of a call at once."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(join_problems(self.problems))


class DataError(RapidformerError):
    """Data that is missing, empty, malformed for the task, or out of range."""


class ModelError(RapidformerError):
    """A model that cannot be found, built or loaded."""


class CheckpointError(RapidformerError):
    """A checkpoint that is missing, incomplete or made for another model."""


class WriteError(CheckpointError):
    """A checkpoint or model that could not be written; what was there before is as it was."""

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(
            f"{target} cannot be written: {reason}. What was saved before is as it was: resume the "
            "run with --load once this is fixed."
        )
        self.target, self.reason = target, reason

    def __reduce__(self) -> tuple[Any, ...]:  # it travels between ranks
        return type(self), (self.target, self.reason)


class TrainingError(RapidformerError):
    """A run that must not continue, such as one whose loss is NaN."""


class MissingPackageError(RapidformerError):
    """An optional package that a setting needs is not installed."""

    def __init__(self, package: str, needed_for: str, extra: str | None = None) -> None:
        install = f"rapidformer[{extra}]" if extra else package
        super().__init__(f"{needed_for} needs the package {package}: pip install '{install}'.")


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Whether torch's allocator or CUDA itself found no memory: each says so in its own way."""
    # By name: importing torch here would make every command slow.
    name, text = type(error).__name__, str(error).lower()
    return name == "OutOfMemoryError" or (
        isinstance(error, RuntimeError)
        and any(library in text for library in ("cuda", "cublas", "cudnn", "cufft"))
        and ("out of memory" in text or "alloc_failed" in text)
    )


def raise_problems(problems: list[str]) -> None:
    """Raise one error with all problems, if there are any."""
    if problems:
        raise ConfigurationError(problems)


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Add what is wrong inside to these problems, instead of raising it."""
    try:
        yield
    except RapidformerError as error:
        problems += getattr(error, "problems", [str(error)])


def count(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def list_some(names: Sequence[str], most: int = 3) -> str:
    """``a, b, c and 2 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def list_first(names: Iterable[object], most: int = 10) -> str:
    """``a, b, c, ...``: the first names of a list that may be long."""
    shown = list(map(str, names))
    return ", ".join(shown[:most] + ["..."] * (len(shown) > most))


def join_problems(problems: list[str]) -> str:
    """One sentence, or a list of them."""
    if len(problems) == 1:
        return problems[0]
    lines = "\n".join(f"  - {problem}" for problem in problems)
    return f"{len(problems)} problems:\n{lines}"


def end_sentence(text: str) -> str:
    """With a full stop, unless the last sentence is in brackets and has its own."""
    return text if text.endswith(")") else f"{text}."
