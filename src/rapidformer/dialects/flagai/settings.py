"""FlagAI's arguments as the ``Settings`` of a run, by the table in ``dialects/flagai/names.py``.

If a DeepSpeed file and the constructor disagree, the file wins, as in FlagAI, but not silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rapidformer.config import Settings, arguments_from_mapping
from rapidformer.config.deepspeed import merge_deepspeed
from rapidformer.config.deepspeed_file import (
    find_value,
    get_zero_stage,
    load_deepspeed_file,
    modernize,
)
from rapidformer.dialects.calls import add_launch_flags, check_names
from rapidformer.dialects.flagai.names import FLAGAI
from rapidformer.errors import ConfigurationError
from rapidformer.foreign_names import copy_mapped
from rapidformer.log import say_once

ENVIRONMENTS = ("pytorch", "pytorchDDP", "deepspeed", "deepspeed+mpu")
_SOURCE = "Trainer(...)"
_DEFAULT = "derived: FlagAI's default"
_BY_FILE = "derived: a DeepSpeed file may say otherwise"
_NEVER = 2**31 - 1
_LORA = ("lora_alpha", "lora_dropout", "lora_target_modules")
# FlagAI's cosine ends at a tenth of the rate.
_LAST_FRACTION = 0.1


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with FlagAI's defaults; every problem is in the one ConfigurationError."""
    values = {name: row.default for name, row in FLAGAI.items()} | dict(given)
    problems: list[str] = []
    check_names("Trainer", given, FLAGAI, problems)
    if values["env_type"] not in ENVIRONMENTS:
        problems.append(
            f"env_type={values['env_type']!r} must be one of {', '.join(ENVIRONMENTS)}."
        )
    sizes = {given[n] for n in ("model_parallel_size", "model_paralle_size") if n in given}
    if len(sizes) > 1:
        problems.append("model_parallel_size and model_paralle_size are one value: give one.")
    values["model_parallel_size"] = values["model_paralle_size"] = max([1, *sizes])
    needs_file = values["env_type"].startswith("deepspeed")
    if needs_file and not values["deepspeed_config"]:
        problems.append(
            f"env_type={values['env_type']!r} needs deepspeed_config='deepspeed.json': optimizer "
            "and ZeRO stage come from that file."
        )
    if sizes and max(sizes) > 1 and values["env_type"] != "deepspeed+mpu":
        problems.append(
            f"model_parallel_size={max(sizes)} needs env_type='deepspeed+mpu', "
            f"got {values['env_type']!r}."
        )
    if problems:
        raise ConfigurationError(problems)
    return values


def report_unused(values: Mapping[str, Any], given: set[str]) -> None:
    """Say which of the arguments given do nothing in this environment."""
    if values["deepspeed_config"] and not values["env_type"].startswith("deepspeed"):
        say_once(
            f"deepspeed_config={values['deepspeed_config']!r} is not used: "
            f"env_type is {values['env_type']!r}."
        )
    if not values["lora"]:
        for name in sorted({"lora_r", *_LORA} & given):
            say_once(f"Trainer({name}=...) has no effect without lora=True.")


def build_settings(values: Mapping[str, Any], given: set[str]) -> Settings:
    """The settings of a run."""
    mapped = copy_mapped(values, FLAGAI) | _translate(values)
    said = {FLAGAI[name].setting for name in given if FLAGAI[name].setting}
    settings = arguments_from_mapping(mapped, source=_SOURCE)
    settings = _forget(settings, {name for name in mapped if name not in said}, _DEFAULT)
    settings = add_launch_flags(settings, mapped)
    if values["env_type"].startswith("deepspeed"):
        return _take_file(settings, values, said)
    return settings


def _translate(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "epochs": values["epochs"],
        "lr_decay_style": "cosine",
        "min_lr": _LAST_FRACTION * float(values["lr"]),
        "eval_interval": values["eval_interval"] or _NEVER,
        "log_first_step": False,
        "save": values["save_dir"] or "none",
        "save_interval": values["save_interval"] or _NEVER,
        "checkpoint_activations": values["checkpoint_activations"]
        or values["deepspeed_activation_checkpointing"],
        "device": "auto",
        # These two are the launcher's, which has done its work.
        "hostfile": None,
        "nproc_per_node": None,
        "nnodes": None,
        "master_addr": None,
        "master_port": None,
        "load_optim": True,
    }
    if values["lora"]:
        found |= {name: values[name] for name in _LORA} | {"lora_rank": values["lora_r"]}
    if values["tensorboard_dir"]:
        found["tensorboard_dir"] = str(Path(values["tensorboard_dir"]) / values["experiment_name"])
    if values["env_type"] == "pytorch":
        found["device"] = "cpu" if str(values["pytorch_device"]) == "cpu" else "cuda"
    return found


def _forget(settings: Settings, names: set[str], source: str) -> Settings:
    """The same values, but no longer as ones that the user has given."""
    sources = {**settings.sources, **dict.fromkeys(names & set(settings.sources), source)}
    return dataclasses.replace(settings, sources=sources)


def _take_file(settings: Settings, values: Mapping[str, Any], said: set[str]) -> Settings:
    """Let the file win over the constructor, and say over what."""
    path = str(values["deepspeed_config"])
    content = load_deepspeed_file(path)
    open_names = set(settings.sources) - {"tensor_model_parallel_size", "save"}
    asked = _forget(settings, open_names, _BY_FILE).replace(_SOURCE, deepspeed=path)
    if any(
        find_value(modernize(content), f"{kind}.enabled") is not None for kind in ("fp16", "bf16")
    ):
        asked = asked.replace(_BY_FILE, fp16=False)
    if find_value(content, "scheduler.type") is not None:
        asked = asked.replace(_BY_FILE, lr_warmup_fraction=None)
    if find_value(content, "train_batch_size") is not None:
        asked = asked.replace(_BY_FILE, gradient_accumulation_steps=None)
    stage, size = get_zero_stage(asked, content), asked.tensor_model_parallel_size
    if size > 1 and stage == 3:
        merged = _use_our_own(asked, content)
    else:
        merged, _ = merge_deepspeed(asked)
    _report_overridden(settings, merged, said, path)
    return merged if merged.deepspeed is None else asked


def _use_our_own(asked: Settings, content: dict[str, Any]) -> Settings:
    """Our ZeRO-3 and tensor parallelism with the file's numbers."""
    path, size = asked.deepspeed or "", asked.tensor_model_parallel_size
    merged, problems = merge_deepspeed(asked.replace(_BY_FILE, tensor_model_parallel_size=1))
    if problems:
        raise ConfigurationError(problems)
    say_once(
        "DeepSpeed's ZeRO-3 does not combine with tensor parallelism: rapidformer's own ZeRO-3 x "
        f"tensor parallelism of {size} is used, with the values of {path}."
    )
    zero = modernize(content).get("zero_optimization")
    offloads = (
        isinstance(zero, dict) and (zero.get("offload_optimizer") or {}).get("device") == "cpu"
    )
    return merged.replace(
        f"{path}: zero_optimization",
        deepspeed=None,
        tensor_model_parallel_size=size,
        cpu_offload=bool(offloads),
        zero_3_memory_optimization=True,
    )


def _report_overridden(before: Settings, merged: Settings, said: set[str], path: str) -> None:
    """Every argument that the user gave and the file has changed, in one line."""
    compared = sorted(said - {"deepspeed", "fp16"})
    changed = [
        f"{name} {getattr(before, name)} (now {getattr(merged, name)})"
        for name in compared
        if getattr(before, name) != getattr(merged, name)
    ]
    if before.fp16 and merged.mixed_precision != "fp16" and not merged.fp16:
        changed.append(f"fp16 True (now {merged.mixed_precision or 'fp32'})")
    if changed:
        say_once(f"{path} wins over the Trainer's own arguments: {', '.join(changed)}.")
