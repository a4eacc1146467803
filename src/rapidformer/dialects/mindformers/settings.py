"""The settings of a run of MindFormers' trainer, and its problems before anything is started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rapidformer.config import Settings
from rapidformer.dialects.huggingface.settings import build_settings
from rapidformer.dialects.mindformers.context import get_context
from rapidformer.dialects.mindformers.names import TRAINING_ARGUMENTS
from rapidformer.dist.processes import get_world_size_from_environment
from rapidformer.errors import ConfigurationError
from rapidformer.tasks.rows.preflight import find_task_problems

SOURCE = "Trainer"
_WIDTHS = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")


def build_parallel_settings(args: Any, overriding: Mapping[str, Any]) -> Settings:
    """The training arguments as settings; ``set_parallel_config`` and the like override them."""
    given = {
        name: getattr(args, name)
        for name in TRAINING_ARGUMENTS
        if getattr(args, name, None) is not None
    }
    given |= overriding
    values = {
        row.setting: given[name]
        for name, (_, row) in TRAINING_ARGUMENTS.items()
        if row.outcome == "mapped" and name in given
    }
    context = get_context()
    if context.device is not None or str(given.get("device_target")).upper() == "CPU":
        values["device"] = "cpu"
    if context.shards_optimizer:
        values["zero_1_memory_optimization"] = True
    if given.get("select_recompute"):
        values |= {"checkpoint_activations": True, "recompute_granularity": "selective"}
    if context.splits_models:
        _check_widths(given)
    else:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size",
                     "context_parallel_size"):  # fmt: skip
            values.pop(name, None)
    if values.get("pipeline_model_parallel_size", 1) > 1 and given.get("micro_batch_num"):
        values["gradient_accumulation_steps"] = given["micro_batch_num"]
    return build_settings(args).replace(SOURCE, **values)


def _check_widths(given: Mapping[str, Any]) -> None:
    widths = {name: int(given.get(name) or 1) for name in _WIDTHS}
    world, product = get_world_size_from_environment(), math.prod(widths.values())
    if "data_parallel" in given and product != world:
        listed = " x ".join(f"{name} {width}" for name, width in widths.items())
        raise ConfigurationError(
            f"{listed} = {product}, but {world} processes run: start {product}, or change one."
        )


def check_task(settings: Settings, *, reads_files: bool, has_own_metrics: bool) -> None:
    """Report every problem of a training run, before the earlier run in its folder is moved."""
    if has_own_metrics:  # their names are known only once they have been computed
        settings = settings.replace(SOURCE, metric_for_best_model=None)
    rows: list[Any] | None = None if reads_files else []
    problems = find_task_problems(settings, "train", torch.cuda.device_count(), rows)
    if problems:
        raise ConfigurationError(problems)
