"""From Hugging Face's ``TrainingArguments`` to the ``Settings`` of a run.

Names whose value must be translated; ``names.py`` says what becomes of the others. A value that the
user did not change counts as not given, so that a DeepSpeed file may still set it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from rapidformer.config import Settings, arguments_from_mapping
from rapidformer.config.deepspeed_file import spell_deepspeed
from rapidformer.dialects.calls import add_launch_flags, check_names
from rapidformer.dialects.huggingface.names import (
    HUGGING_FACE,
    NEEDS_METRICS,
    AcceleratorOptions,
    NamedFields,
    list_changed,
)
from rapidformer.errors import collecting, raise_problems
from rapidformer.foreign_names import find_names
from rapidformer.log import warn_once

_SOURCE = "TrainingArguments"
_DEFAULT = "derived: Hugging Face's default"
# Schedules of ours that are the same curve; transformers makes the others.
_CURVES = {"linear": "linear", "cosine": "cosine", "constant": "constant",
           "constant_with_warmup": "constant"}  # fmt: skip
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}
_ACCUMULATION = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
"""What ``gradient_accumulation_kwargs`` may hold; only the first changes what a run computes."""
_READ = ("split_batches", "gradient_accumulation_kwargs")
"""What has an effect of ``accelerator_config``."""
MADE_HERE = {"adagrad": "Adagrad", "rmsprop": "RMSprop", "adafactor": "transformers' own"}

Values = dict[str, Any]
_Translate = Callable[[NamedFields, list[str]], Values]


def build_settings(arguments: NamedFields) -> Settings:
    """The settings of a run; every problem of the arguments is in the one ConfigurationError."""
    arguments.use_plain_words()  # a script may have set fields since
    settings = check_arguments(arguments)
    return add_launch_flags(settings)


def check_arguments(arguments: NamedFields) -> Settings:
    """The same without the launcher's flags, and without leaving a trace."""
    arguments = copy.copy(arguments)
    problems = _drop_wrong_types(arguments)
    problems += _find_problems(arguments)
    changed = set(list_changed(arguments))
    said: Values = {}
    assumed: Values = {}
    for name in find_names(HUGGING_FACE, "mapped"):
        place = said if name in changed else assumed
        place[HUGGING_FACE[name].setting] = getattr(arguments, name)
    for names, translate in _TRANSLATIONS.items():
        (said if changed & set(names) else assumed).update(translate(arguments, problems))
    # A field of a subclass is its own business.
    theirs = {name: getattr(arguments, name) for name in HUGGING_FACE if name in changed}
    check_names(_SOURCE, theirs, HUGGING_FACE, problems)
    settings = Settings()
    with collecting(problems):
        settings = arguments_from_mapping(said, source=_SOURCE)
    raise_problems(problems)
    # The defaults are converted too, since `replace` does not do it.
    rest = {name: value for name, value in assumed.items() if name not in said}
    checked = arguments_from_mapping(rest)
    return settings.replace(_DEFAULT, **{name: getattr(checked, name) for name in rest})


def _drop_wrong_types(arguments: NamedFields) -> list[str]:
    """Put the default in place of what is no number; returns what is wrong."""
    problems, mapped = [], set(find_names(HUGGING_FACE, "mapped"))
    for name, may_be_none in _list_numbers().items():
        value = getattr(arguments, name)
        is_text = isinstance(value, str) and name in mapped and not name.endswith("_steps")
        is_none = value is None and (may_be_none or name in mapped)
        if not (isinstance(value, Number) or is_text or is_none):
            problems.append(f"{name} must be a number, got {value!r}.")
            setattr(arguments, name, getattr(NamedFields, name))
    return problems


@functools.cache
def _list_numbers() -> dict[str, bool]:
    """The fields that hold a number, and whether each may also be None."""
    kinds = {name: {*get_args(hint), hint} for name, hint in get_type_hints(NamedFields).items()}
    return {
        name: NoneType in held
        for name, held in kinds.items()
        if held & {int, float} and not held & {bool, str}
    }


def _find_problems(arguments: NamedFields) -> Iterator[str]:
    """Rules of transformers' own; ours between settings are checked with the run."""
    for name in ("logging", "eval", "save"):
        steps: Any = getattr(arguments, f"{name}_steps")
        if getattr(arguments, f"{name}_strategy") != "steps" or steps is None:
            continue
        if steps < 0 or (steps > 1 and steps != int(steps)):
            yield f"{name}_steps must be whole, or below 1 (a share of the run), got {steps}."
        elif steps == 0 and name != "save":
            yield f"{name}_strategy='steps' needs {name}_steps above 0."
    for suffix in ("", "_full_eval"):
        if getattr(arguments, f"fp16{suffix}") and getattr(arguments, f"bf16{suffix}"):
            yield (
                f"fp16{suffix}=True and bf16{suffix}=True contradict each other: give only one of "
                "them."
            )
    empties: Any = arguments.torch_empty_cache_steps
    if empties is not None and (not isinstance(empties, int) or empties < 1):
        yield f"torch_empty_cache_steps must be a whole number of at least 1, got {empties!r}."


def _translate_schedule(arguments: NamedFields, problems: list[str]) -> Values:
    kind, warmup = arguments.lr_scheduler_type, arguments.warmup_steps
    if kind in NEEDS_METRICS and arguments.eval_strategy == "no":
        problems.append(f"lr_scheduler_type={kind!r} looks at metrics: set eval_strategy.")
    values: Values = {"lr_decay_style": _CURVES.get(kind, "linear")}
    if (last := _find_last_rate(arguments)) is not None:
        values |= {"lr_decay_style": "cosine", "min_lr": last}
    if kind == "constant":
        return values  # no warm-up, whatever is said
    if warmup < 0:
        problems.append(f"warmup_steps must not be negative, got {warmup}.")
    elif 0 < warmup < 1:
        values["lr_warmup_fraction"] = warmup
    else:
        values["lr_warmup_iters"] = int(warmup)
    return values


def has_own_curve(arguments: NamedFields) -> bool:
    """Whether a schedule of ours is the one asked for; otherwise transformers makes it."""
    kind = arguments.lr_scheduler_type
    # transformers rounds a fractional warm-up up to whole updates; our curve does not.
    if 0 < arguments.warmup_steps < 1 and kind != "constant":
        return False
    is_known = kind in _CURVES and not arguments.lr_scheduler_kwargs
    return is_known or _find_last_rate(arguments) is not None


def _find_last_rate(arguments: NamedFields) -> float | None:
    """Where transformers' cosine_with_min_lr ends; None for any other schedule."""
    options = arguments.lr_scheduler_kwargs
    if arguments.lr_scheduler_type != "cosine_with_min_lr" or not isinstance(options, Mapping):
        return None
    if set(options) == {"min_lr"}:
        return float(options["min_lr"])
    if set(options) == {"min_lr_rate"}:
        return float(options["min_lr_rate"]) * arguments.learning_rate
    return None


def _translate_optimizer(arguments: NamedFields, problems: list[str]) -> Values:
    name = arguments.optim
    if name not in OPTIMIZERS and name not in MADE_HERE:
        known = ", ".join([*OPTIMIZERS, *MADE_HERE])
        problems.append(
            f"optim={name!r} is not built in: use {known}, or make the optimizer yourself and pass "
            "Trainer(optimizers=(optimizer, None))."
        )
    # transformers' SGD has no momentum unless optim_args say so.
    return {"optimizer": OPTIMIZERS.get(name, "adamw"), "sgd_momentum": 0.0}


def _translate_logging(arguments: NamedFields, problems: list[str]) -> Values:
    level = arguments.log_level
    values: Values = {"log_level": {"passive": "info", "critical": "error"}.get(level, level)}
    if arguments.disable_tqdm is not None:
        values["progress"] = not arguments.disable_tqdm
    return values


def _translate_data(arguments: NamedFields, problems: list[str]) -> Values:
    sampling = arguments.train_sampling_strategy
    if sampling not in ("random", "sequential", "group_by_length", "batch_rebalance"):
        problems.append(
            f"train_sampling_strategy must be random, sequential or group_by_length, got "
            f"{sampling!r}."
        )
    return {
        "keep_last": not arguments.dataloader_drop_last,
        "dataloader_type": "single" if sampling == "sequential" else "cyclic",
        "group_by_length": sampling in ("group_by_length", "batch_rebalance"),
    }


def _translate_fsdp(arguments: NamedFields, problems: list[str]) -> Values:
    """``fsdp`` in its words of any age (True, "full_shard auto_wrap"), and ``fsdp_config``."""
    asked: Any = arguments.fsdp
    words = asked.split() if isinstance(asked, str) else []
    words = list(asked) if isinstance(asked, (list, tuple)) else words
    words = [str(getattr(word, "value", word)).lower() for word in words]
    if not asked or asked == "false":
        return {}
    config = read_mapping(arguments.fsdp_config, "fsdp_config", problems)
    config = {key.removeprefix("fsdp_"): value for key, value in config.items()}
    reshards = config.get("reshard_after_forward", True)
    is_stage_2 = "shard_grad_op" in words or str(reshards).lower() in ("false", "shard_grad_op")
    known = ("full_shard", "shard_grad_op", "hybrid_shard", "offload", "auto_wrap", "true")
    for word in words:
        if word not in known:
            problems.append(f"fsdp={asked!r}: {word!r} is not one of {', '.join(known)}.")
    values: Values = {
        "zero_2_memory_optimization" if is_stage_2 else "zero_3_memory_optimization": True
    }
    if "offload" in words or _is_true(config.get("cpu_offload")):
        values["cpu_offload"] = True
    if "hybrid_shard" in words:
        values["hybrid_sharding_size"] = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if _is_true(config.get("activation_checkpointing")):
        values["checkpoint_activations"] = True
    return values


def _translate_accelerator(arguments: NamedFields, problems: list[str]) -> Values:
    config = read_mapping(arguments.accelerator_config, "accelerator_config", problems)
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    if config.get("split_batches") and processes > 1:
        rows = arguments.per_device_train_batch_size
        problems.append(
            f"accelerator_config: with split_batches, per_device_train_batch_size={rows} counts "
            f"the rows of all {processes} processes. Here it always counts those of one: leave "
            f"split_batches out, and divide both batch sizes by {processes}."
        )
    known = dataclasses.asdict(AcceleratorOptions())
    for name, value in config.items():
        if name not in known:
            problems.append(f"accelerator_config: {name!r} is not one of {', '.join(known)}.")
        elif name not in _READ and value != known[name]:
            warn_once(f"accelerator_config: {name} has no effect, as Accelerate is not used.")
    accumulation = config.get("gradient_accumulation_kwargs") or {}
    problems += [
        f"accelerator_config: {name!r} in gradient_accumulation_kwargs is not one of "
        f"{', '.join(_ACCUMULATION)}."
        for name in accumulation
        if name not in _ACCUMULATION
    ]
    steps = accumulation.get("num_steps")
    if steps is None:
        return {}
    if arguments.gradient_accumulation_steps not in (1, steps):
        problems.append(
            f"accelerator_config says num_steps={steps}, and gradient_accumulation_steps is "
            f"{arguments.gradient_accumulation_steps}: give one of them."
        )
    return {"gradient_accumulation_steps": steps}


def _translate_parallelism(arguments: NamedFields, problems: list[str]) -> Values:
    config = arguments.parallelism_config
    if config is None:
        return {}

    def get(name: str) -> int:
        size = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return int(size or 1)

    values: Values = {
        "tensor_model_parallel_size": get("tp_size"),
        "context_parallel_size": max(get("cp_size"), get("sp_size")),
    }
    if get("dp_shard_size") > 1:
        values["zero_3_memory_optimization"] = True
        if get("dp_replicate_size") > 1:
            values["hybrid_sharding_size"] = get("dp_shard_size")
    return values


def _translate_deepspeed(arguments: NamedFields, problems: list[str]) -> Values:
    content = arguments.deepspeed
    return {"deepspeed": spell_deepspeed(content)} if content else {}


_TRANSLATIONS: dict[tuple[str, ...], _Translate] = {
    ("max_steps",): lambda args, _: (
        {"train_iters": args.max_steps, "epochs": None} if args.max_steps > 0 else {}),
    ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"): _translate_schedule,
    ("optim",): _translate_optimizer,
    ("torch_compile_backend",): lambda args, _: (
        {"compile": True, "compile_backend": args.torch_compile_backend}
        if args.torch_compile_backend is not None else {}),
    ("log_level", "disable_tqdm"): _translate_logging,
    ("eval_steps", "eval_strategy"): lambda args, _: (
        {"eval_interval": args.eval_steps or args.logging_steps}
        if args.eval_strategy == "steps" else {}),
    ("save_only_model",): lambda args, _: dict.fromkeys(
        ("save_optim", "save_rng"), not args.save_only_model),
    ("use_cpu", "ddp_timeout"): lambda args, _: {
        "device": "cpu" if args.use_cpu else "auto",
        "distributed_timeout_minutes": args.ddp_timeout / 60},
    ("dataloader_drop_last", "train_sampling_strategy"): _translate_data,
    ("fsdp", "fsdp_config"): _translate_fsdp,
    ("accelerator_config",): _translate_accelerator,
    ("parallelism_config",): _translate_parallelism,
    ("deepspeed",): _translate_deepspeed,
}  # fmt: skip


def read_mapping(value: Any, name: str, problems: list[str]) -> dict[str, Any]:
    """A dictionary, a dataclass, or the JSON file that holds one."""
    if value is None or isinstance(value, dict):
        return dict(value or {})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    try:
        content = json.loads(Path(value).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as reason:
        problems.append(f"{name}={value!r} cannot be read as JSON: {reason}.")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{name}={value!r} must hold a JSON object.")
        return {}
    return content


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "on", "1")
