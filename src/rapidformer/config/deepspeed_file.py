"""Read a DeepSpeed JSON file, and build the configuration that DeepSpeed gets.

The engine keeps the schedule, the loss scale, autocast and (if it is one of ours) the optimizer, so
those sections never reach DeepSpeed.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from rapidformer.config.reading import read_settings_text
from rapidformer.config.sections import AccelerationArguments
from rapidformer.config.settings import Settings
from rapidformer.errors import ConfigurationError

AUTO = "auto"
Section = dict[str, Any]

OUR_OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "sgd": "sgd"}
# Parameters that our optimizers have too; any other leaves the optimizer to DeepSpeed.
_OUR_PARAMETERS = {
    "adam": {"lr", "weight_decay", "betas", "eps", "torch_adam", "adam_w_mode", "bias_correction"},
    "sgd": {"lr", "weight_decay", "momentum"},
}
_NUMBERS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "gradient_clipping", "zero_optimization.stage", "tensor_parallel.autotp_size",
    "fp16.loss_scale", "fp16.initial_scale_power", "fp16.min_loss_scale", "fp16.hysteresis",
    "fp16.loss_scale_window", "optimizer.params.lr", "optimizer.params.eps",
    "optimizer.params.weight_decay", "scheduler.params.warmup_num_steps",
    "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr",
    "scheduler.params.total_num_steps",
)  # fmt: skip


def spell_deepspeed(content: Section | str | Path) -> str:
    """The path of a file, or what would be in it, as the value of ``--deepspeed``."""
    if not isinstance(content, dict):
        return str(content)
    try:
        return json.dumps(content)
    except (TypeError, ValueError) as reason:
        raise ConfigurationError(
            f"a configuration of DeepSpeed must be what JSON can hold: {reason}."
        ) from None


def name_deepspeed_file(given: str) -> str:
    """How messages call it."""
    return "the configuration of DeepSpeed" if _is_content(given) else given


def _is_content(given: str) -> bool:
    return given.lstrip().startswith("{")


def load_deepspeed_file(given: str) -> Section:
    """The file's content; anything that prevents reading it is a ConfigurationError."""
    text = given if _is_content(given) else read_settings_text(given, "--deepspeed")
    path = name_deepspeed_file(given)
    try:
        content = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as reason:
        raise ConfigurationError(f"--deepspeed {path} is not valid JSON: {reason}.") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"--deepspeed {path} must contain a JSON object.")
    problems = [
        f"--deepspeed {path}: {key} must be a number, got {value!r}."
        for key in _NUMBERS
        if not isinstance(value := find_value(content, key), (int, float, type(None)))
    ]
    if problems:
        raise ConfigurationError(problems)
    return content


def find_value(section: Section, key: str) -> Any:
    """The value under a dotted key; None if it is missing or ``"auto"``."""
    value: Any = section
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value == AUTO else value


def get_zero_stage(args: AccelerationArguments, content: Section) -> int:
    """The file's stage, or that of our flags if the file does not set one."""
    section = content.get("zero_optimization")
    if isinstance(section, bool):
        return int(section)  # an early spelling of stage 1
    stage = find_value(content, "zero_optimization.stage")
    return args.zero_stage if stage is None else int(stage)


def uses_our_optimizer(content: Section) -> bool:
    """Whether the file's optimizer is one of ours (or none is given), so torch's is used."""
    section = content.get("optimizer")
    if not isinstance(section, dict) or section.get("type") in (None, AUTO):
        return True
    kind, parameters = str(section["type"]).lower(), section.get("params") or {}
    family = "sgd" if kind == "sgd" else "adam"
    plain = all(parameters.get(name, True) for name in ("torch_adam", "adam_w_mode"))
    return kind in OUR_OPTIMIZERS and set(parameters) <= _OUR_PARAMETERS[family] and plain


def has_own_precision(content: Section, mixed_precision: str | None) -> bool:
    """Whether DeepSpeed keeps the weights in 16 bits: the file has a section for that precision."""
    section = modernize(content).get(mixed_precision or "")
    return isinstance(section, dict) and section.get("enabled") in (True, AUTO)


def build_deepspeed_config(args: Settings, mixed_precision: str | None) -> Section:
    """The configuration for DeepSpeed: the file, completed with the run's settings."""
    assert args.deepspeed is not None
    content = modernize(load_deepspeed_file(args.deepspeed))
    stage, is_ours = get_zero_stage(args, content), uses_our_optimizer(content)
    is_half = has_own_precision(content, mixed_precision)
    zero = content.setdefault("zero_optimization", {})
    # Stage 0's optimizers cannot handle split gradients; stage 1 gives the same numbers.
    needs_zero = is_half or args.tensor_model_parallel_size > 1
    zero["stage"] = max(stage, 1) if needs_zero else stage
    if args.cpu_offload and stage:
        zero.setdefault("offload_optimizer", {"device": "cpu"})
        if stage == 3:
            zero.setdefault("offload_param", {"device": "cpu"})
    for name in ("fp16", "bf16", "torch_autocast", "scheduler"):
        content.pop(name, None)
    if is_half:
        scale = {"loss_scale": 1.0} if mixed_precision == "fp16" else {}
        content[mixed_precision or ""] = {"enabled": True, **scale}
    if is_ours:
        content.pop("optimizer", None)
        content["zero_allow_untested_optimizer"] = True
    else:
        parameters = _without_autos(content["optimizer"].get("params") or {})
        rate = {} if args.lr is None else {"lr": args.lr}
        content["optimizer"]["params"] = {"weight_decay": args.weight_decay} | parameters | rate
    content["zero_force_ds_cpu_optimizer"] = False
    # The update's clock clips. Without this line, DeepSpeed would clip at 1.0.
    content["gradient_clipping"] = 0.0
    content["train_micro_batch_size_per_gpu"] = args.micro_batch_size
    content["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    # DeepSpeed computes it, and would count tensor-parallel ranks as replicas.
    content.pop("train_batch_size", None)
    content.setdefault("steps_per_print", 2**31)
    content.pop("tensor_parallel", None)  # our own splits the layers
    return _without_autos(content)


def get_file_schedule(args: Settings, train_iters: int | None) -> tuple[str, Section] | None:
    """The file's scheduler and its parameters for a run of this many updates, if it has one."""
    if args.deepspeed is None:
        return None
    content = load_deepspeed_file(args.deepspeed)
    kind = find_value(content, "scheduler.type")
    if kind is None:
        return None
    length = args.lr_decay_iters or train_iters
    warmup = args.lr_warmup_iters or round((args.lr_warmup_fraction or 0.0) * (length or 0))
    filled = {
        "warmup_min_lr": 0.0, "warmup_max_lr": args.lr, "warmup_num_steps": max(warmup, 1),
        "total_num_steps": length,
    }  # fmt: skip
    parameters: Section = {
        key: filled.get(key) if value == AUTO else value
        for key, value in (content["scheduler"].get("params") or {}).items()
        if value != AUTO or key in filled
    }
    for name in ("warmup_num_steps", "total_num_steps"):
        if isinstance(parameters.get(name), float):
            parameters[name] = int(parameters[name])  # JSON reads 1e3 as a float
    if parameters.get("total_num_steps", 0) is None:
        raise ConfigurationError(
            "scheduler.params.total_num_steps in "
            f"{name_deepspeed_file(args.deepspeed)} is auto, but the length of the run is not "
            "known: give --train-iters or --epochs."
        )
    return str(kind), parameters


def _without_autos(value: Any) -> Any:
    """Drop the remaining "auto" values, so DeepSpeed uses its defaults."""
    if not isinstance(value, dict):
        return value
    return {key: _without_autos(inner) for key, inner in value.items() if inner != AUTO}


def modernize(content: Section) -> Section:
    """A copy with old spellings replaced by the current ones."""
    content = copy.deepcopy(content)
    if "bfloat16" in content:
        content.setdefault("bf16", content.pop("bfloat16"))
    if isinstance(content.get("zero_optimization"), bool):
        content["zero_optimization"] = {"stage": int(content["zero_optimization"])}
    zero = content.get("zero_optimization")
    if isinstance(zero, dict):
        newer = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}
        for old, new in newer.items():
            if zero.pop(old, False) is True:
                zero.setdefault(new, {"device": "cpu"})
    return content


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> Section:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} occurs twice")
    return content
