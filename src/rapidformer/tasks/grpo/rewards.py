"""Reward functions: a user's Python files, checked before training and called on answers.

``reward(prompts, answers, **columns) -> list of numbers``, one for each answer. What goes wrong in
one is the user's to mend: the error is one line with the function and the row. Imports no torch.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.config.objective_sections import GrpoArguments
from rapidformer.errors import ConfigurationError, DataError, count, list_some

Rewards = list[list[float]]
"""Per answer, what each function returned; NaN where a function does not apply (None)."""
_DEFAULT_NAME = "reward"
_PACKAGE = str(Path(__file__).parents[2])
_OWN = ("prompts", "answers", "answer_ids")
"""What every function may ask for besides the columns of the data."""


@dataclass(frozen=True)
class RewardFunction:
    """A function that scores answers, with its name in the metrics and its weight in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    def check(self, columns: Sequence[str]) -> None:
        """Refuse a function that asks for a column which the data lacks."""
        needed = [
            parameter.name
            for parameter in _list_parameters(self.function)[2:]
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        missing = [name for name in needed if name not in (*columns, *_OWN)]
        if missing:
            raise DataError(
                f"the reward function {self.name} asks for {' and '.join(missing)}, but the data "
                f"has the columns {', '.join(columns)}: add what is missing, or give the parameter "
                "a default."
            )

    def call(self, answers: Sequence[Answer]) -> list[float]:
        """The rewards of answers; an error names the row."""
        try:
            returned = self._call(answers)
        except Exception as error:  # the user's code may raise anything
            row, reason = self._find_row(answers, error)
            raise DataError(
                f"the reward function {self.name} failed on {row}: {_describe(reason)}."
            ) from reason
        try:
            values = None if isinstance(returned, (str, Mapping)) else list(returned)
        except TypeError:  # not even a tensor or an array of one dimension
            values = None
        if values is None or len(values) != len(answers):
            kind = f"a {type(returned).__name__}"
            raise DataError(
                f"the reward function {self.name} returned "
                f"{kind if values is None else count(len(values), 'reward')} for "
                f"{count(len(answers), 'answer')} ({_name_rows(answers)}): return a list with one "
                "number for each answer."
            )
        return [self._read(value, answer) for value, answer in zip(values, answers, strict=True)]

    def _call(self, answers: Sequence[Answer]) -> Any:
        columns = {name: [answer.row[name] for answer in answers] for name in answers[0].row}
        columns["answer_ids"] = [answer.ids for answer in answers]
        parameters = _list_parameters(self.function)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            asked = {parameter.name for parameter in parameters}
            columns = {name: values for name, values in columns.items() if name in asked}
        prompts = [answer.prompt for answer in answers]
        taken = {name: values for name, values in columns.items() if name not in _OWN[:2]}
        return self.function(prompts, [answer.text for answer in answers], **taken)

    def _find_row(self, answers: Sequence[Answer], error: Exception) -> tuple[str, Exception]:
        """The first answer on which the function fails alone, and how."""
        for answer in answers:
            try:
                self._call([answer])
            except Exception as reason:  # as above
                return f"{answer.place} (answer {shorten(answer.text)})", reason
        return _name_rows(answers), error

    def _read(self, value: Any, answer: Answer) -> float:
        if value is None:
            return math.nan
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, RuntimeError):  # the last one is a tensor's
            number = math.nan
        if math.isfinite(number):
            return number
        raise DataError(
            f"the reward function {self.name} returned {shorten(value)} for {answer.place} "
            f"(answer {shorten(answer.text)}): return a finite number, or None where it does not "
            "apply."
        )


@dataclass(frozen=True)
class Answer:
    prompt: Any
    """As the row has it: a text or messages."""
    text: str
    ids: list[int]
    row: dict[str, Any]
    """The other columns of the row."""
    place: str
    """``train, row 3``."""


def read_answers(ids: Sequence[list[int]], row: Mapping[str, Any], tokenizer: Any) -> list[Answer]:
    """Answers to the prompt of a row, as the functions get them."""
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [
        Answer(row["prompt"], text, list(tokens), row["columns"], row["place"])
        for text, tokens in zip(texts, ids, strict=True)
    ]


def score(functions: Sequence[RewardFunction], answers: Sequence[Answer]) -> Rewards:
    """What each function says about each answer; at least one must apply."""
    if not answers:
        return []
    table = [function.call(answers) for function in functions]
    rows = [list(values) for values in zip(*table, strict=True)]
    for values, answer in zip(rows, answers, strict=True):
        if all(map(math.isnan, values)):
            raise DataError(
                f"no reward function applies to {answer.place}: all of them returned None."
            )
    return rows


def add_up(values: Sequence[float], functions: Sequence[RewardFunction]) -> float:
    """The weighted sum of the rewards that apply."""
    pairs = zip(values, functions, strict=True)
    return sum(function.weight * value for value, function in pairs if not math.isnan(value))


def load_reward_functions(args: GrpoArguments) -> list[RewardFunction]:
    """The functions of ``--reward-function``, with their weights."""
    sources = args.reward_function or []
    if not sources:
        raise ConfigurationError(
            "--task grpo needs --reward-function FILE.py, a Python file with "
            "reward(prompts, answers, **columns) -> one number for each answer."
        )
    return weigh([_load(source) for source in sources], args.reward_weights)


def weigh(
    functions: Sequence[tuple[str, Callable[..., Any]]], weights: Sequence[float] | None
) -> list[RewardFunction]:
    """Functions by name, with their weights."""
    names = [name for name, _ in functions]
    weights = weights or [1.0] * len(names)
    if len(weights) != len(names):
        raise ConfigurationError(
            f"the reward weights are {count(len(weights), 'number')} for "
            f"{count(len(names), 'reward function')}: give one for each."
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            f"two reward functions are called {twice}, which is their name in the metrics: rename "
            "one of them."
        )
    pairs = zip(functions, weights, strict=True)
    return [RewardFunction(name, function, weight) for (name, function), weight in pairs]


@functools.cache  # the user's code must run once
def _load(source: str) -> tuple[str, Callable[..., Any]]:
    """``file.py`` has a function ``reward``; ``file.py:name`` has another."""
    file, colon, name = source.rpartition(":")
    if not colon or "/" in name or name.endswith(".py"):
        file, name = source, ""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigurationError(f"--reward-function {source}: there is no file {file}.")
    spec = importlib.util.spec_from_file_location(f"rapidformer_rewards_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"--reward-function {source}: {file} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    sys.path.append(str(path.parent.resolve()))  # as for a script: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise ConfigurationError(
            f"--reward-function {source} cannot be imported: {_describe(error)}."
        ) from error
    function = getattr(module, name or _DEFAULT_NAME, None)
    if not callable(function):
        raise ConfigurationError(
            f"--reward-function {source}: {file} has no function {name or _DEFAULT_NAME}; "
            "FILE.py:NAME takes another one."
        )
    if len(_list_parameters(function)) < 2:
        raise ConfigurationError(
            f"--reward-function {source}: the function must take (prompts, answers, **columns)."
        )
    return name or path.stem, function


def _list_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _describe(error: Exception) -> str:
    """An error in the user's code, with its last line there."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((_PACKAGE, "<frozen"))]
    same = [frame for frame in theirs if frame.filename == theirs[0].filename]
    where = f" (line {same[-1].lineno} of {same[-1].filename})" if same else ""
    return f"{type(error).__name__}: {error}{where}".replace("\n", " ")


def _name_rows(answers: Sequence[Answer]) -> str:
    return list_some(list(dict.fromkeys(answer.place for answer in answers)))


def shorten(value: Any, letters: int = 60) -> str:
    """The value as Python writes it, or its beginning."""
    text = repr(value)
    return text if len(text) <= letters else f"{text[: letters - 3]}..."
