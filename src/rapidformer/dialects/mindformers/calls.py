"""The arguments of MindFormers' trainer and its verbs, and what ``predict`` reads and answers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rapidformer.config import arguments_from_mapping
from rapidformer.config.task_sections import GenerationArguments, RunArguments
from rapidformer.data.sources import load_splits
from rapidformer.dialects.calls import check_names
from rapidformer.dialects.huggingface.evaluating import run_evaluation
from rapidformer.dialects.huggingface.events import LoopEvents
from rapidformer.dialects.mindformers.names import PET_METHODS, TASKS, TRAINER, TRAINING_ARGUMENTS
from rapidformer.dialects.mindformers.settings import MindFormersArguments
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError, DataError, raise_problems
from rapidformer.foreign_names import Table
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.runner import TaskFinetuner
from rapidformer.training.callbacks import Control, RunningLoop


def name_by_type(others: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments from the fifth on, whose order changed between versions: by what they are."""
    named: dict[str, Any] = {}
    datasets = iter(("train_dataset", "eval_dataset"))
    for value in others:
        if hasattr(value, "convert_tokens_to_ids"):
            named["tokenizer"] = value
        elif callable(value):
            named["data_collator"] = value
        elif (name := next(datasets, None)) is not None:
            named[name] = value
        else:
            raise ConfigurationError("Trainer(...): name the arguments after eval_dataset.")
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
    raise_problems(problems)


def check_options(function: str, options: dict[str, Any], table: Table) -> dict[str, Any]:
    """The options, if the function takes all of them."""
    problems: list[str] = []
    check_names(function, options, table, problems)
    raise_problems(problems)
    return options


_FOR_COMMAND = {"stream", "chat", "system_prompt"}
_GENERATION = {f.name for f in dataclasses.fields(GenerationArguments)} - _FOR_COMMAND
_OF_SAMPLING = {"temperature", "top_k", "top_p", "min_p"}


def read_generation(options: Mapping[str, Any]) -> dict[str, Any]:
    """How to generate, from the options of ``predict``; settings that it shares with ours."""
    values: dict[str, Any] = {}
    unknown = []
    # As in MindFormers, these say nothing without it.
    idle = () if options.get("do_sample") else _OF_SAMPLING
    for name, value in options.items():
        if name == "max_length" or name == "seed" or name in _GENERATION:
            if value is not None and name not in idle:
                values["max_new_tokens" if name == "max_length" else name] = value
        elif value not in (None, False):
            unknown.append(f"predict({name}={value!r}) is not supported.")
    if unknown:
        names = ", ".join(sorted(_GENERATION))
        raise ConfigurationError([*unknown, f"predict() takes max_length, seed, {names}."])
    checked = arguments_from_mapping(values, source="predict()")
    return {name: getattr(checked, name) for name in values}


Row = dict[str, Any] | str


def read_prompts(data: Any) -> list[Row]:
    """A text, a file with a text per line, a list of texts, or a data set's rows."""
    if data is None:
        raise DataError("Trainer.predict() needs input_data: a text, a list of texts or a file.")
    # Not with Path: a long text is no file name.
    if isinstance(data, Path) or (isinstance(data, str) and os.path.isfile(data)):  # noqa: PTH113
        lines = Path(data).read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.strip()]
    if isinstance(data, (str, dict)):
        return [data]
    rows = list(data)
    if not rows:
        raise DataError("Trainer.predict(): input_data is empty.")
    return rows


def rename_answers(task: str, rows: list[Row], answers: list[dict[str, Any]]) -> list[Any]:
    """What the task of ours says, under the keys of MindFormers' pipelines."""
    if task == "text_generation":
        prompts = [row if isinstance(row, str) else "" for row in rows]
        return [
            {"text_generation_text": [prompt + text for text in _list_texts(answer)]}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    if task == "translation":
        return [{"translation_text": _list_texts(answer)} for answer in answers]
    if task in ("text_classification", "image_classification"):
        return [[{key: answer[key] for key in ("label", "score")}] for answer in answers]
    return answers


def _list_texts(answer: dict[str, Any]) -> list[str]:
    """One text, or ``num_return_sequences`` of them."""
    texts = answer["generated"]
    return texts if isinstance(texts, list) else [texts]


class TaskEvents(LoopEvents):
    """The events of a task's run, in which the loop itself evaluates."""

    def on_train_begin(self, loop: RunningLoop, control: Control) -> None:
        self._trainer.optimizer = loop.engine.updates.optimizer
        self._trainer.lr_scheduler = loop.engine.updates.lr_scheduler
        super().on_train_begin(loop, control)

    def on_evaluate(self, loop: RunningLoop, control: Control, metrics: dict[str, float]) -> None:
        with self._asking(loop, control, "on_evaluate", "on_log"):
            self._trainer.log(dict(metrics))
            self._trainer.callbacks.call("on_evaluate", metrics=dict(metrics))


class GivenTask(TaskFinetuner):
    """A task whose splits may be data sets, and whose run may have callbacks and metrics."""

    def __init__(self, engine: RapidformerEngine, settings: RunArguments, trainer: Any) -> None:
        super().__init__(engine, get_task(settings.task or ""))
        self._trainer = trainer
        splits = (("train", trainer.train_dataset), ("validation", trainer.eval_dataset))
        self._given = {n: data for n, data in splits if data is not None and not is_path(data)}

    def prepare_data(self) -> Any:
        if not self._given:
            return super().prepare_data()
        has_paths = bool(self.args.train_data or self.args.valid_data)
        read = load_splits(self.args) if has_paths else {}
        return self.task.prepare(self.args, {**read, **self._given})

    def compose(self) -> Any:
        model = super().compose()
        if self._trainer.has_hooks:
            self._trainer.adopt_task(self.engine, model, self.processor)
            self.callbacks = [TaskEvents(self._trainer)]
        return model

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        metrics = super().run_compute_metrics(model, eval_dataloader)
        return {**metrics, **measure_own(self._trainer, eval_dataloader)}


def measure_own(trainer: Any, loader: Any) -> dict[str, float]:
    """What the trainer's ``compute_metrics``, if it has one, says of a loader's data."""
    if trainer.compute_metrics is None:
        return {}
    output = run_evaluation(trainer, loader, loss_only=False, ignore_keys=None, prefix="eval")
    metrics = {name.removeprefix("eval_"): value for name, value in (output.metrics or {}).items()}
    metrics.pop("loss", None)  # the task's own is the same
    return metrics


def is_path(data: Any) -> bool:
    """Whether data is given as a file or folder."""
    return isinstance(data, (str, Path))
