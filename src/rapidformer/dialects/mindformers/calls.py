"""The arguments of MindFormers' trainer and its verbs: which there are, and what they mean here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rapidformer.config import arguments_from_mapping
from rapidformer.config.sections import GenerationArguments
from rapidformer.dialects.mindformers.arguments import MindFormersArguments
from rapidformer.dialects.mindformers.names import PET_METHODS, TASKS, TRAINER, TRAINING_ARGUMENTS
from rapidformer.errors import ConfigurationError
from rapidformer.foreign_names import ForeignName
from rapidformer.log import warn_once


def name_by_type(others: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments from the fifth on, whose order changed between versions: by what they are."""
    named: dict[str, Any] = {}
    datasets = iter(("train_dataset", "eval_dataset"))
    for each in others:
        if hasattr(each, "convert_tokens_to_ids"):
            named["tokenizer"] = each
        elif callable(each):
            named["data_collator"] = each
        else:
            name = next(datasets, None)
            if name is None:
                raise ConfigurationError("Trainer(...): name the arguments after eval_dataset.")
            named[name] = each
    return named


def check_arguments(args: Any, task: str, named: Mapping[str, Any]) -> None:
    """Refuse what the trainer does not know or support; report what has no effect."""
    problems = []
    if task != "general" and task not in TASKS:
        problems.append(f"task={task!r} is not supported: use one of {', '.join(TASKS)}.")
    for name, value in named.items():
        row = TRAINER.get(name)
        if row is None:
            problems.append(f"Trainer has no argument {name!r}.")
        elif name == "pet_method" and value and value not in PET_METHODS:
            problems.append(f"pet_method={value!r} must be one of {', '.join(PET_METHODS)}, or ''.")
        elif row.outcome == "refused" and value:
            problems.append(f"Trainer({name}={value!r}) is not supported: {row.note}.")
    for name in TRAINING_ARGUMENTS if isinstance(args, MindFormersArguments) else ():
        default, row = TRAINING_ARGUMENTS[name]
        value = getattr(args, name)
        if row.outcome == "refused" and value:
            problems.append(f"TrainingArguments({name}={value!r}) is not supported: {row.note}.")
        elif row.outcome == "ignored" and value not in (default, None):
            warn_once(f"TrainingArguments({name}=...) has no effect: {row.note}.")
    if problems:
        raise ConfigurationError(problems)


def check_names(
    function: str, given: dict[str, Any], table: Mapping[str, ForeignName]
) -> dict[str, Any]:
    """What was given, if the function takes all of it."""
    unknown = [name for name in given if name not in table]
    if unknown:
        raise ConfigurationError([f"{function}() has no argument {name!r}." for name in unknown])
    return given


_GENERATION = {each.name for each in dataclasses.fields(GenerationArguments)}
_FOR_COMMAND = {"stream", "chat"}
_OF_SAMPLING = {"temperature", "top_k", "top_p", "min_p"}


def read_generation(options: Mapping[str, Any]) -> dict[str, Any]:
    """How to generate, from the options of ``predict``; settings that it shares with ours."""
    values: dict[str, Any] = {}
    unknown = []
    for name, value in options.items():
        if name == "max_length":
            values["max_new_tokens"] = value
        elif name in _GENERATION - _FOR_COMMAND or name == "seed":
            values[name] = value
        elif value not in (None, False):
            unknown.append(f"predict({name}={value!r}) is not supported.")
    if unknown:
        names = ", ".join(sorted(_GENERATION - _FOR_COMMAND))
        raise ConfigurationError([*unknown, f"predict() takes max_length, seed, {names}."])
    if not values.get("do_sample"):  # as in MindFormers, these say nothing without it
        values = {name: value for name, value in values.items() if name not in _OF_SAMPLING}
    given = {name: value for name, value in values.items() if value is not None}
    checked = arguments_from_mapping(given, source="predict()")
    return {name: getattr(checked, name) for name in given}
