"""Find all problems of a black-box command at once, before anything heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.schema import to_flag
from rapidformer.config.sections import CheckpointArguments, LaunchArguments
from rapidformer.config.stream_rules import find_length_problems
from rapidformer.config.task_sections import RunArguments
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.hub import is_missing_folder, suggest_path
from rapidformer.models.location import (
    check_folder,
    check_head,
    get_model_location,
    is_from_scratch,
    is_model_folder,
)
from rapidformer.nearest import suggest
from rapidformer.strict_json import parse_json
from rapidformer.tasks.base import Task
from rapidformer.tasks.registry import get_task, is_pretraining

_PRETRAINING_METRICS = ("loss", "perplexity", "lm_loss", "sop_loss", "moe_loss")
_GPU_DRIVER = Path("/proc/driver/nvidia")
_OUTPUTS = ("", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
STANDARD_INPUT = "-"
"""``--input -``: one text or JSON object per line of standard input."""


def find_task_problems(
    args: Settings, command: str, num_gpus: int, rows: list[Any] | None = None
) -> list[str]:
    """Every problem of a command, or of a call, which is given its first ``rows``.

    The command ``data show`` looks at rows alone.
    """
    problems = [*_check_device(args, num_gpus), *_check_needs(args, command)]
    problems += _check_save(args) if command == "train" else _check_output(args, command)
    problems += find_length_problems(args) if command == "train" else ()
    if args.task is None:
        return problems
    if is_pretraining(args.task) and command != "predict":
        problems += _check_metric(args, _PRETRAINING_METRICS)
        return [*problems, *_check_pretraining(args, command)]
    try:
        task = get_task(args.task)
    except RapidformerError as error:
        return [*problems, str(error)]
    problems += _check_metric(args, (*task.metrics, *_list_set_metrics(args, task)))
    if args.streaming and not task.streams:
        problems.append(f"--streaming: --task {task.name} prepares all rows at once. Leave it out.")
    problems += _check_model(args, task if command in ("evaluate", "predict") else None)
    problems += _check_input(args, task) if command == "predict" else ()
    has_answers = command != "predict"
    problems += task.find_problems(args) if command in ("train", "evaluate") else ()
    if rows is not None:
        problems += _check_columns(args, task, rows, has_answers=has_answers)
    elif has_answers or (args.input is None and not args.chat):
        problems += _check_data(args, task, has_answers=has_answers)
    return problems


def _check_device(args: LaunchArguments, num_gpus: int) -> Iterator[str]:
    # Without nvidia-smi the GPUs cannot be counted, but the driver's folder shows if there are any.
    if args.device == "cuda" and num_gpus == 0 and not _GPU_DRIVER.exists():
        yield "--device cuda: this machine has no GPU. Omit --device to run on the CPU."


def _check_needs(args: Settings, command: str) -> Iterator[str]:
    for setting in ("chat", "stream", "input", "system_prompt", "image"):
        if command != "predict" and args.is_changed(setting):
            yield f"--{setting.replace('_', '-')} is for `rapidformer predict`: leave it out."
    # A folder that is missing is the problem to report.
    is_missing = args.load is not None and is_missing_folder(args.load)
    if command == "train" and args.task is None and not is_missing:
        yield (
            "nothing to train: give --task (see `rapidformer tasks`), --user-script FILE, or "
            "--load RUN to go on with the run of a task."
        )
    if command in ("evaluate", "predict"):
        name = args.load or args.pretrained_model_name_or_path
        if name is None and not args.model_type:
            yield (
                f"{command} needs a trained model: give --load RUN, the folder of a run or of a "
                "model."
            )
        # A folder without a model is the problem to report.
        elif args.task is None and (
            args.load is None or is_model_folder(Path(args.load).expanduser())
        ):
            path = Path(name or "").expanduser()
            reason = (
                "--load does not name a run with a task"
                if name is None or path.exists()
                else f"{name} is not a folder here.{suggest_path(path)} Check its name, or give "
                "the task of a Hub model"
            )
            yield f"{command} needs --task, since {reason}; `rapidformer tasks` lists them."


def _check_save(args: CheckpointArguments) -> Iterator[str]:
    """Find a folder that cannot be written to before hours are spent on what goes there."""
    if args.save is None:
        return
    folder = Path(args.save).expanduser()
    if folder.exists() and not folder.is_dir():
        yield f"--save {args.save} is a file: give a folder for the run."
        return
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not _can_write_to(nearest):
        yield f"--save {args.save}: {nearest} cannot be written to. Choose another folder."


def _check_output(args: RunArguments, command: str) -> Iterator[str]:
    if args.output is None:
        return
    file = Path(args.output).expanduser()
    if command == "predict" and file.suffix.lower() not in _OUTPUTS:
        yield (f"--output {args.output}: end the name in .jsonl, .json, .csv, .tsv or .parquet.")
    if file.is_dir():
        yield f"--output {args.output} is a folder: give a file in it."
    elif file.exists() and (not file.is_file() or file.parent == Path("/dev")):
        # The finished file would replace the device or pipe: root can delete /dev/null like that.
        yield (
            f"--output {args.output} is not a regular file: give another name, or no --output to "
            "write to the terminal."
        )
    elif file.parent.is_dir() and not _can_write_to(file.parent):
        yield f"--output {args.output}: {file.parent} cannot be written to. Choose another folder."


def _can_write_to(folder: Path) -> bool:
    # /proc and /sys look writable to root, but are not.
    is_virtual = folder.resolve().parts[:2] in (("/", "proc"), ("/", "sys"))
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and not is_virtual


def _check_metric(args: Settings, metrics: tuple[str, ...]) -> Iterator[str]:
    metric = args.metric_for_best_model
    if metric is None or metric.removeprefix("eval_") in metrics:
        return
    yield (
        f"--metric-for-best-model {metric}: --task {args.task} has no such metric. It has "
        f"{', '.join(metrics[:20])}.{suggest(metric, metrics)}"
    )


def _check_pretraining(args: Settings, command: str) -> Iterator[str]:
    from rapidformer.data.indexed.layout import check_files_exist, strip_ending
    from rapidformer.data.pretraining.blend import parse_data_prefix

    if command == "train":
        yield from find_missing_length(args)
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        given = getattr(args, name)
        try:
            for item in parse_data_prefix(given, to_flag(name)) if given is not None else ():
                check_files_exist(strip_ending(item.prefix))
        except RapidformerError as error:
            yield str(error)


def find_missing_length(args: Settings) -> Iterator[str]:
    """What has no default in pre-training, since it depends on the corpus."""
    if args.train_iters is None and args.train_samples is None and args.train_tokens is None:
        yield "give the length of training: --train-iters, --train-samples or --train-tokens."
    if args.lr is None:
        yield "--task pretraining needs --lr, the peak learning rate."


def _list_set_metrics(args: Settings, task: Task) -> list[str]:
    """The names of the metrics of a mixture's sets."""
    from rapidformer.data.named_sets import read_sets

    try:
        return [f"{item.label}_{name}" for item in read_sets(args) for name in task.metrics]
    except RapidformerError:
        return []  # reported with the other problems of the data


def _check_model(args: Settings, asked_task: Task | None) -> Iterator[str]:
    """``asked_task`` is the task that the model must have been trained for, if any."""
    from rapidformer.models.adapter_folder import find_files, is_adapter_folder, read_base

    location = get_model_location(args)
    if location is None and args.model_type is None and args.load is None:
        yield (
            "no model: give --pretrained-model-name-or-path (a folder or a name on the Hub), or "
            "--model-type with sizes."
        )
    if location is None:
        return
    try:
        location = find_files(location, "config.json")
        assert location is not None
        check_folder(location, needed=None if args.model_type else "config.json")
        weights = read_base(location) if is_adapter_folder(location) else location
        check_folder(weights, needs_weights=not is_from_scratch(args))
        if asked_task is not None and not (args.allow_untrained or is_from_scratch(args)):
            check_head(asked_task.auto_class, _read_architectures(location), location)
    except RapidformerError as error:
        yield str(error)


def _read_architectures(location: str) -> list[str]:
    try:
        config = parse_json((Path(location) / "config.json").read_bytes())
        return [str(name) for name in config.get("architectures") or ()]
    except (OSError, ValueError, AttributeError, TypeError):
        return []  # on the Hub, or broken: loading it reports that


def _check_input(args: Settings, task: Task) -> Iterator[str]:
    texts = args.input or []
    if args.chat and {"causal_lm", "image_text"}.isdisjoint((task.name, *task.reads_as)):
        yield (
            f"--chat needs --task causal_lm or image_text, not {task.name}: only their models "
            "answer in turns."
        )
    if args.image and task.name != "image_text":
        yield f"--image needs --task image_text, not {task.name}."
    if args.stream and "generated" not in task.answer_keys:
        yield f"--stream needs a task that generates text; {task.name} does not."
    # A run's own --config file may name its training data.
    is_asked = args.sources.get("data_path") in ("command line", "code")
    has_data = args.data_path is not None and is_asked
    flags = [flag for flag, is_given in (("--input", texts), ("--data-path", has_data)) if is_given]
    if args.chat and flags:
        yield f"--chat takes what you type: leave out {' and '.join(flags)}."
    elif len(flags) > 1:
        yield "--input and --data-path exclude each other: give only one of them."
    if STANDARD_INPUT in texts and len(texts) > 1:
        yield "--input - reads standard input, and cannot be combined with other texts."
    objects = [text for text in texts if text.lstrip().startswith("{")]
    if objects and len(objects) < len(texts):
        plain = next(text for text in texts if text not in objects)
        yield (
            f"--input mixes texts ({plain[:40]!r}) and JSON objects ({objects[0][:40]!r}): give "
            "either texts, or objects with the same columns."
        )
    for text in texts:
        if _looks_like_missing_file(text):
            yield f"--input {text}: there is no such file."
    for text in objects:
        try:
            parse_json(text)
        except ValueError as reason:
            shown = repr(text[:60])
            yield f"--input {shown} is not valid JSON: {reason}. Texts must not begin with {{."


def _looks_like_missing_file(text: str) -> bool:
    """Whether a text without spaces has the ending of a data file that does not exist."""
    if len(text) >= 256 or text.split(maxsplit=1) != [text]:
        return False
    from rapidformer.data.files import get_format

    return get_format(Path(text)) is not None and not Path(text).expanduser().is_file()


def _check_data(args: Settings, task: Task, *, has_answers: bool) -> list[str]:
    from rapidformer.data.heads import read_heads
    from rapidformer.data.named_sets import read_sets

    try:
        sets = read_sets(args)
    except ConfigurationError as error:
        return error.problems
    except RapidformerError as error:
        return [str(error)]
    if sets:
        return [
            f"{item.label}: {problem}"
            for item in sets
            for problem in _check_data(item.apply(args), task, has_answers=has_answers)
        ]
    if not any((args.data_path, args.data_dir, args.train_data, args.valid_data, args.test_data)):
        if args.data_name is not None:  # on its own, it is the dataset's name
            return []
        what = "" if has_answers else "--input TEXT ... or "
        return [f"no data: give {what}--data-path, a file, a folder or a dataset on the Hub."]
    problems: list[str] = []
    heads = read_heads(args, problems)
    for path, rows in heads.items():
        if found := _check_columns(args, task, rows, has_answers=has_answers):
            return problems + [f"{path}: {text}" if len(heads) > 1 else text for text in found]
    return problems


def _check_columns(args: Settings, task: Task, rows: list[Any], *, has_answers: bool) -> list[str]:
    if not rows or not all(isinstance(row, dict) for row in rows):
        return []
    try:
        task.check_head(rows, args, has_answers=has_answers)
    except RapidformerError as error:
        return [str(error)]
    return []
