"""``TrainingArguments`` in MindFormers' words: Hugging Face's class with its names and defaults."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import make_dataclass
from typing import Any

from rapidformer.dialects.huggingface.arguments import TrainingArguments
from rapidformer.dialects.imports import MINDFORMERS
from rapidformer.dialects.mindformers.context import adopt_rank_variables
from rapidformer.dialects.mindformers.names import DEFAULTS, OPTIMIZERS, TRAINING_ARGUMENTS
from rapidformer.errors import ConfigurationError

_Fields: Any = make_dataclass(
    "_Fields",
    [
        *((name, Any, dataclasses.field(default=default)) for name, default in DEFAULTS.items()),
        *(
            (name, Any, dataclasses.field(default=row[0]))
            for name, row in TRAINING_ARGUMENTS.items()
        ),
    ],
    bases=(TrainingArguments,),
    repr=False,
)


class MindFormersArguments(_Fields):  # type: ignore[misc]
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
            given = getattr(self, name)
            if name.endswith("train_batch_size") and given not in (default, self.batch_size):
                raise ConfigurationError(
                    f"batch_size={self.batch_size} and {name}={given} are one value: give one."
                )
            if given == default:
                setattr(self, name, self.batch_size)
