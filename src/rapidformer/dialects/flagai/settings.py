"""FlagAI's arguments as ``Settings``, by ``names.py``; a DeepSpeed file wins, with a word."""

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
from rapidformer.errors import raise_problems
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


def complete(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with FlagAI's defaults; every problem is in the one ConfigurationError."""
    values = {name: row.default for name, row in FLAGAI.items()} | dict(named)
    problems: list[str] = []
    check_names("Trainer", named, FLAGAI, problems)
    kind = values["env_type"]
    if kind not in ENVIRONMENTS:
        problems.append(f"env_type={kind!r} must be one of {', '.join(ENVIRONMENTS)}.")
    sizes = {named[n] for n in ("model_parallel_size", "model_paralle_size") if n in named}
    if len(sizes) > 1:
        problems.append("model_parallel_size and model_paralle_size are one value: give one.")
    size = values["model_parallel_size"] = values["model_paralle_size"] = max([1, *sizes])
    if kind.startswith("deepspeed") and not values["deepspeed_config"]:
        problems.append(
            f"env_type={kind!r} needs deepspeed_config='deepspeed.json': optimizer and ZeRO stage "
            "come from that file."
        )
    if size > 1 and kind != "deepspeed+mpu":
        problems.append(f"model_parallel_size={size} needs env_type='deepspeed+mpu', got {kind!r}.")
    raise_problems(problems)
    return values


def report_unused(values: Mapping[str, Any], names: set[str]) -> None:
    """Say which of the arguments given do nothing in this environment."""
    if values["deepspeed_config"] and not values["env_type"].startswith("deepspeed"):
        say_once(
            f"deepspeed_config={values['deepspeed_config']!r} is not used: "
            f"env_type is {values['env_type']!r}."
        )
    if not values["lora"]:
        for name in sorted({"lora_r", *_LORA} & names):
            say_once(f"Trainer({name}=...) has no effect without lora=True.")


def build_settings(values: Mapping[str, Any], names: set[str]) -> Settings:
    """The settings of a run."""
    mapped = copy_mapped(values, FLAGAI) | _translate(values)
    said = {FLAGAI[name].setting for name in names if FLAGAI[name].setting}
    settings = arguments_from_mapping(mapped, source=_SOURCE)
    settings = _forget(settings, {name for name in mapped if name not in said}, _DEFAULT)
    settings = add_launch_flags(settings, mapped)
    if values["env_type"].startswith("deepspeed"):
        return _take_file(settings, values, said)
    return settings


def _translate(values: Mapping[str, Any]) -> dict[str, Any]:
    recomputes = values["checkpoint_activations"] or values["deepspeed_activation_checkpointing"]
    settings: dict[str, Any] = {
        "epochs": values["epochs"], "lr_decay_style": "cosine",
        "min_lr": _LAST_FRACTION * float(values["lr"]), "log_first_step": False,
        "eval_interval": values["eval_interval"] or _NEVER, "save": values["save_dir"] or "none",
        "save_interval": values["save_interval"] or _NEVER, "checkpoint_activations": recomputes,
        "device": "auto", "load_optim": True,
        # Of the launcher, which has done its work.
        "hostfile": None, "nproc_per_node": None, "nnodes": None, "master_addr": None,
        "master_port": None,
    }  # fmt: skip
    if values["lora"]:
        settings |= {name: values[name] for name in _LORA} | {"lora_rank": values["lora_r"]}
    if values["tensorboard_dir"]:
        folder = Path(values["tensorboard_dir"]) / values["experiment_name"]
        settings["tensorboard_dir"] = str(folder)
    if values["env_type"] == "pytorch":
        settings["device"] = "cpu" if str(values["pytorch_device"]) == "cpu" else "cuda"
    return settings


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
    modern = modernize(content)
    for file, key, changed in (
        (modern, "fp16.enabled", {"fp16": False}),
        (modern, "bf16.enabled", {"fp16": False}),
        (content, "scheduler.type", {"lr_warmup_fraction": None}),
        (content, "train_batch_size", {"gradient_accumulation_steps": None}),
    ):
        if find_value(file, key) is not None:
            asked = asked.replace(_BY_FILE, **changed)
    stage, size = get_zero_stage(asked, content), asked.tensor_model_parallel_size
    if size > 1 and stage == 3:
        merged = _use_our_own(asked, content)
    else:
        merged, _ = merge_deepspeed(asked)
    _report_overridden(settings, merged, said, path)
    chosen = merged if merged.deepspeed is None else asked
    if merged.lr is None or find_value(content, "scheduler.type") is not None:
        return chosen
    return chosen.replace(_BY_FILE, min_lr=_LAST_FRACTION * merged.lr)  # of the file's rate


def _use_our_own(asked: Settings, content: dict[str, Any]) -> Settings:
    """Our ZeRO-3 and tensor parallelism with the file's numbers."""
    path, size = asked.deepspeed or "", asked.tensor_model_parallel_size
    merged, problems = merge_deepspeed(asked.replace(_BY_FILE, tensor_model_parallel_size=1))
    raise_problems(problems)
    say_once(
        "DeepSpeed's ZeRO-3 does not combine with tensor parallelism: rapidformer's own ZeRO-3 x "
        f"tensor parallelism of {size} is used, with the values of {path}."
    )
    device = find_value(modernize(content), "zero_optimization.offload_optimizer.device")
    return merged.replace(
        f"{path}: zero_optimization", deepspeed=None, tensor_model_parallel_size=size,
        cpu_offload=device == "cpu", zero_3_memory_optimization=True,
    )  # fmt: skip


def _report_overridden(before: Settings, merged: Settings, said: set[str], path: str) -> None:
    """Every argument that the user gave and the file has changed, in one line."""
    values = {n: (getattr(before, n), getattr(merged, n)) for n in said - {"deepspeed", "fp16"}}
    changed = [f"{n} {old} (now {new})" for n, (old, new) in sorted(values.items()) if old != new]
    if before.fp16 and merged.mixed_precision != "fp16" and not merged.fp16:
        changed.append(f"fp16 True (now {merged.mixed_precision or 'fp32'})")
    if changed:
        say_once(f"{path} wins over the Trainer's own arguments: {', '.join(changed)}.")
