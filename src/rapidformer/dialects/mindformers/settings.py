"""``TrainingArguments`` with MindFormers' names and defaults, as the settings of a run."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import make_dataclass
from typing import Any

import torch

from rapidformer.config import Settings
from rapidformer.dialects.calls import MINDFORMERS
from rapidformer.dialects.huggingface.arguments import TrainingArguments
from rapidformer.dialects.huggingface.settings import build_settings
from rapidformer.dialects.mindformers.context import adopt_rank_variables, get_context
from rapidformer.dialects.mindformers.names import DEFAULTS, OPTIMIZERS, TRAINING_ARGUMENTS
from rapidformer.dist.processes import get_world_size_from_environment
from rapidformer.errors import ConfigurationError, raise_problems
from rapidformer.foreign_names import copy_mapped
from rapidformer.tasks.rows.preflight import find_task_problems

_DEFAULTS = {**DEFAULTS, **{name: row.default for name, row in TRAINING_ARGUMENTS.items()}}
_Fields: Any = make_dataclass(
    "_Fields",
    [(name, Any, dataclasses.field(default=default)) for name, default in _DEFAULTS.items()],
    bases=(TrainingArguments,),
    repr=False,
)


class MindFormersArguments(_Fields):
    """What ``TrainingArguments(batch_size=..., sink_size=...)`` makes."""

    room = MINDFORMERS
    optim: str
    logging_steps: float

    def __post_init__(self) -> None:
        adopt_rank_variables(os.environ)
        self._take_batch_size()
        self.optim = OPTIMIZERS.get(self.optim, self.optim)
        if self.evaluation_strategy is not None:
            self.eval_strategy = self.evaluation_strategy
        if self.eval_step_interval:
            self.eval_strategy, self.eval_steps = "steps", self.eval_step_interval
        if self.warmup_ratio:
            self.warmup_steps = float(self.warmup_ratio)
        if self.sink_size and self.sink_mode and self.logging_steps == DEFAULTS["logging_steps"]:
            self.logging_steps = self.sink_size
        super().__post_init__()

    def _take_batch_size(self) -> None:
        """``batch_size`` overrides both sizes, as there; one value under two names must agree."""
        if self.batch_size is None:
            return
        default = TrainingArguments.per_device_train_batch_size
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            size = getattr(self, name)
            if name.endswith("train_batch_size") and size not in (default, self.batch_size):
                raise ConfigurationError(
                    f"batch_size={self.batch_size} and {name}={size} are one value: give one."
                )
            if size == default:
                setattr(self, name, self.batch_size)


SOURCE = "Trainer"
_WIDTHS = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")


def build_parallel_settings(
    args: Any, overriding: Mapping[str, Any], *, allows_replicas: bool = False
) -> Settings:
    """The arguments as settings; spare processes hold copies of the model (``allows_replicas``)."""
    named = {name: getattr(args, name, None) for name in TRAINING_ARGUMENTS}
    said = {name: value for name, value in named.items() if value is not None}
    said |= overriding
    values = copy_mapped(said, TRAINING_ARGUMENTS)
    context = get_context()
    if context.device is not None or str(said.get("device_target")).upper() == "CPU":
        values["device"] = "cpu"
    if context.shards_optimizer:
        values["zero_1_memory_optimization"] = True
    if said.get("select_recompute"):
        values |= {"checkpoint_activations": True, "recompute_granularity": "selective"}
    if context.splits_models:
        _check_widths(said, allows_replicas=allows_replicas)
    else:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size",
                     "context_parallel_size"):  # fmt: skip
            values.pop(name, None)
    if values.get("pipeline_model_parallel_size", 1) > 1 and said.get("micro_batch_num"):
        values["gradient_accumulation_steps"] = said["micro_batch_num"]
    return build_settings(args).replace(SOURCE, **values)


def _check_widths(said: Mapping[str, Any], *, allows_replicas: bool) -> None:
    widths = {name: int(said.get(name) or 1) for name in _WIDTHS}
    world, product = get_world_size_from_environment(), math.prod(widths.values())
    if allows_replicas and world % product == 0:
        return
    if "data_parallel" in said and product != world:
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
    raise_problems(problems)
