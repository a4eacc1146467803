"""From Hugging Face's ``TrainingArguments`` to the ``Settings`` of a run.

The table in ``names.py`` beside it says what each name becomes; here stand only the names
whose value must be translated. A value that the user did not change counts as not given, so that a
DeepSpeed file may still set it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rapidformer.config import Settings, arguments_from_mapping
from rapidformer.dialects.calls import add_launch_flags, check_names
from rapidformer.dialects.huggingface.arguments import TrainingArguments, list_changed
from rapidformer.dialects.huggingface.names import HUGGING_FACE
from rapidformer.errors import ConfigurationError

_SOURCE = "TrainingArguments"
_DEFAULT = "derived: Hugging Face's default"
# Schedules of ours that are the same curve; transformers makes the others.
_CURVES = {"linear": "linear", "cosine": "cosine", "constant": "constant",
           "constant_with_warmup": "constant"}  # fmt: skip
_NEEDS_METRICS = ("reduce_lr_on_plateau", "greedy")
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adafactor": "adafactor",
              "sgd": "sgd"}  # fmt: skip
TORCH_OPTIMIZERS = {"adagrad": "Adagrad", "rmsprop": "RMSprop"}

Values = dict[str, Any]
_Translate = Callable[[TrainingArguments, list[str]], Values]


def build_settings(arguments: TrainingArguments) -> Settings:
    """The settings of a run; every problem of the arguments is in the one ConfigurationError."""
    problems: list[str] = []
    changed = list_changed(arguments)
    given, assumed = _copy_mapped(arguments, changed)
    for names, translate in _TRANSLATIONS.items():
        values = translate(arguments, problems)
        (given if set(names) & set(changed) else assumed).update(values)
    # A field of a subclass is its own business.
    said = {name: getattr(arguments, name) for name in changed if name in HUGGING_FACE}
    check_names(_SOURCE, said, HUGGING_FACE, problems)
    settings = _build(given, problems)
    if problems:
        raise ConfigurationError(problems)
    assert settings is not None
    return add_launch_flags(settings.replace(_DEFAULT, **_drop_given(assumed, given)))


def _build(given: Values, problems: list[str]) -> Settings | None:
    try:
        return arguments_from_mapping(given, source=_SOURCE)
    except ConfigurationError as error:
        problems += error.problems
        return None


def _drop_given(assumed: Values, given: Values) -> Values:
    """Defaults for what was not said; converted, as they do not pass through the parser."""
    checked = arguments_from_mapping({k: v for k, v in assumed.items() if k not in given})
    return {name: getattr(checked, name) for name in assumed if name not in given}


def _copy_mapped(arguments: TrainingArguments, changed: list[str]) -> tuple[Values, Values]:
    given: Values = {}
    assumed: Values = {}
    for name, row in HUGGING_FACE.items():
        if row.outcome == "mapped":
            (given if name in changed else assumed)[row.setting] = getattr(arguments, name)
    return given, assumed


def _translate_length(arguments: TrainingArguments, problems: list[str]) -> Values:
    if arguments.max_steps > 0:
        return {"train_iters": arguments.max_steps, "epochs": None}
    return {}


def _translate_schedule(arguments: TrainingArguments, problems: list[str]) -> Values:
    kind, warmup = arguments.lr_scheduler_type, arguments.warmup_steps
    if kind in _NEEDS_METRICS:
        problems.append(
            f"lr_scheduler_type={kind!r} looks at metrics, and the schedule of a run is known "
            "before it starts: use linear or cosine."
        )
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


def has_own_curve(arguments: TrainingArguments) -> bool:
    """Whether a schedule of ours is the one asked for; otherwise transformers makes it.

    transformers rounds a fractional warm-up up to whole updates; our curve does not.
    """
    kind = arguments.lr_scheduler_type
    if 0 < arguments.warmup_steps < 1 and kind != "constant":
        return False
    is_known = kind in _CURVES and not arguments.lr_scheduler_kwargs
    return is_known or _find_last_rate(arguments) is not None


def _find_last_rate(arguments: TrainingArguments) -> float | None:
    """Where transformers' cosine_with_min_lr ends; None for any other schedule."""
    options = arguments.lr_scheduler_kwargs
    if arguments.lr_scheduler_type != "cosine_with_min_lr" or not isinstance(options, Mapping):
        return None
    if set(options) == {"min_lr"}:
        return float(options["min_lr"])
    if set(options) == {"min_lr_rate"}:
        return float(options["min_lr_rate"]) * arguments.learning_rate
    return None


def _translate_optimizer(arguments: TrainingArguments, problems: list[str]) -> Values:
    name = arguments.optim
    if name not in OPTIMIZERS and name not in TORCH_OPTIMIZERS:
        known = ", ".join([*OPTIMIZERS, *TORCH_OPTIMIZERS])
        problems.append(
            f"optim={name!r} is not built in: use {known}, or make the optimizer yourself and pass "
            "Trainer(optimizers=(optimizer, None))."
        )
    # transformers' SGD has no momentum unless optim_args say so.
    return {"optimizer": OPTIMIZERS.get(name, "adamw"), "sgd_momentum": 0.0}


def _translate_compile(arguments: TrainingArguments, problems: list[str]) -> Values:
    if arguments.torch_compile_backend is None:
        return {}
    return {"compile": True, "compile_backend": arguments.torch_compile_backend}


def _translate_logging(arguments: TrainingArguments, problems: list[str]) -> Values:
    level = arguments.log_level
    values: Values = {"log_level": {"passive": "info", "critical": "error"}.get(level, level)}
    if arguments.disable_tqdm is not None:
        values["progress"] = not arguments.disable_tqdm
    return values


def _translate_evaluation(arguments: TrainingArguments, problems: list[str]) -> Values:
    if arguments.eval_strategy != "steps":
        return {}
    return {"eval_interval": arguments.eval_steps or arguments.logging_steps}


def _translate_saving(arguments: TrainingArguments, problems: list[str]) -> Values:
    keeps_state = not arguments.save_only_model
    return {"save_optim": keeps_state, "save_rng": keeps_state}


def _translate_device(arguments: TrainingArguments, problems: list[str]) -> Values:
    return {
        "device": "cpu" if arguments.use_cpu else "auto",
        "distributed_timeout_minutes": arguments.ddp_timeout / 60,
    }


def _translate_data(arguments: TrainingArguments, problems: list[str]) -> Values:
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


def _translate_fsdp(arguments: TrainingArguments, problems: list[str]) -> Values:
    """``fsdp`` in its words of any age (True, "full_shard auto_wrap"), and ``fsdp_config``."""
    asked: Any = arguments.fsdp
    words = asked.split() if isinstance(asked, str) else list(asked) if _is_list(asked) else []
    words = [str(getattr(word, "value", word)).lower() for word in words]
    if not asked or asked == "false":
        return {}
    config = _read_mapping(arguments.fsdp_config, "fsdp_config", problems)
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


def _translate_parallelism(arguments: TrainingArguments, problems: list[str]) -> Values:
    config = arguments.parallelism_config
    if config is None:
        return {}

    def get(name: str) -> int:
        found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return int(found or 1)

    values: Values = {
        "tensor_model_parallel_size": get("tp_size"),
        "context_parallel_size": max(get("cp_size"), get("sp_size")),
    }
    if get("dp_shard_size") > 1:
        values["zero_3_memory_optimization"] = True
        if get("dp_replicate_size") > 1:
            values["hybrid_sharding_size"] = get("dp_shard_size")
    return values


def _translate_deepspeed(arguments: TrainingArguments, problems: list[str]) -> Values:
    """A dictionary is written into the run's folder, where the run can be repeated from."""
    given = arguments.deepspeed
    if not given:
        return {}
    if isinstance(given, str):
        return {"deepspeed": given}
    folder = Path(arguments.output_dir or ".")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".deepspeed.json"  # deepspeed.json may be a file of the user's
    # Every process writes the same text, each by way of a file of its own.
    own = folder / f".deepspeed-{os.getpid()}.json"
    own.write_text(json.dumps(given, indent=2), encoding="utf-8")
    own.replace(path)
    return {"deepspeed": str(path)}


_TRANSLATIONS: dict[tuple[str, ...], _Translate] = {
    ("max_steps",): _translate_length,
    ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"): _translate_schedule,
    ("optim",): _translate_optimizer,
    ("torch_compile_backend",): _translate_compile,
    ("log_level", "disable_tqdm"): _translate_logging,
    ("eval_steps", "eval_strategy"): _translate_evaluation,
    ("save_only_model",): _translate_saving,
    ("use_cpu", "ddp_timeout"): _translate_device,
    ("dataloader_drop_last", "train_sampling_strategy"): _translate_data,
    ("fsdp", "fsdp_config"): _translate_fsdp,
    ("parallelism_config",): _translate_parallelism,
    ("deepspeed",): _translate_deepspeed,
}


def _read_mapping(value: Any, name: str, problems: list[str]) -> dict[str, Any]:
    """A dictionary, or the JSON file that holds one."""
    if value is None or isinstance(value, dict):
        return dict(value or {})
    try:
        content = json.loads(Path(value).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        problems.append(f"{name}={value!r} cannot be read as JSON: {reason}.")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{name}={value!r} must hold a JSON object.")
        return {}
    return content


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "on", "1")
