"""The arguments of MindFormers' trainer and its verbs, and what ``predict`` reads and answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rapidformer.config import arguments_from_mapping
from rapidformer.config.task_sections import GenerationArguments
from rapidformer.dialects.calls import check_names
from rapidformer.dialects.mindformers.names import PET_METHODS, TASKS, TRAINER, TRAINING_ARGUMENTS
from rapidformer.dialects.mindformers.settings import MindFormersArguments
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.foreign_names import Table


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
    problems: list[str] = []
    if task != "general" and task not in TASKS:
        problems.append(f"task={task!r} is not supported: use one of {', '.join(TASKS)}.")
    check_names("Trainer", named, TRAINER, problems)
    method = named.get("pet_method")
    if method and method not in PET_METHODS:
        problems.append(f"pet_method={method!r} must be one of {', '.join(PET_METHODS)}, or ''.")
    if isinstance(args, MindFormersArguments):
        values = {name: getattr(args, name) for name in TRAINING_ARGUMENTS}
        check_names("TrainingArguments", values, TRAINING_ARGUMENTS, problems)
    if problems:
        raise ConfigurationError(problems)


def check_options(function: str, options: dict[str, Any], table: Table) -> dict[str, Any]:
    """The options, if the function takes all of them."""
    problems: list[str] = []
    check_names(function, options, table, problems)
    if problems:
        raise ConfigurationError(problems)
    return options


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


Row = dict[str, Any] | str


def read_prompts(given: Any) -> list[Row]:
    """A text, a file with a text per line, a list of texts, or a data set's rows."""
    if given is None:
        raise DataError("Trainer.predict() needs input_data: a text, a list of texts or a file.")
    if isinstance(given, Path) or (isinstance(given, str) and _is_file(given)):
        lines = Path(given).read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.strip()]
    if isinstance(given, (str, dict)):
        return [given]
    rows = list(given)
    if not rows:
        raise DataError("Trainer.predict(): input_data is empty.")
    return rows


def rename_answers(task: str, rows: list[Row], answers: list[dict[str, Any]]) -> list[Any]:
    """What the task of ours says, under the keys of MindFormers' pipelines."""
    if task == "text_generation":
        return [
            {"text_generation_text": [_get_prompt(row) + text for text in _list_texts(answer)]}
            for row, answer in zip(rows, answers, strict=True)
        ]
    if task == "translation":
        return [{"translation_text": _list_texts(answer)} for answer in answers]
    if task in ("text_classification", "image_classification"):
        return [[{"label": each["label"], "score": each["score"]}] for each in answers]
    return answers


def _list_texts(answer: dict[str, Any]) -> list[str]:
    """One text, or ``num_return_sequences`` of them."""
    found = answer["generated"]
    return found if isinstance(found, list) else [found]


def _get_prompt(row: Row) -> str:
    return row if isinstance(row, str) else ""


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # a long text is no file name
        return False
