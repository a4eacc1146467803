"""rapidformer: train PyTorch transformers, accelerated by switches that never change the result.

The public names are found when they are first asked for, so that ``import rapidformer`` (and
``rapidformer --help``) does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rapidformer.config import TrainingArguments
    from rapidformer.context import get_args, get_timers
    from rapidformer.data.pretraining import build_train_valid_test_datasets_for_huggingface
    from rapidformer.engine import RapidformerEngine
    from rapidformer.errors import RapidformerError
    from rapidformer.log import get_logger
    from rapidformer.models.plan import ModelPlan
    from rapidformer.training.finetuner import Finetuner
    from rapidformer.training.pretrainer import PreTrainer
    from rapidformer.training.pretrainer import PreTrainer as Pretrainer

__all__ = [
    "Finetuner",
    "ModelPlan",
    "PreTrainer",
    "Pretrainer",
    "RapidformerEngine",
    "RapidformerError",
    "TrainingArguments",
    "build_train_valid_test_datasets_for_huggingface",
    "get_args",
    "get_logger",
    "get_timers",
]

_WHERE = {
    "Finetuner": ("rapidformer.training.finetuner", "Finetuner"),
    "ModelPlan": ("rapidformer.models.plan", "ModelPlan"),
    "PreTrainer": ("rapidformer.training.pretrainer", "PreTrainer"),
    "Pretrainer": ("rapidformer.training.pretrainer", "PreTrainer"),
    "RapidformerEngine": ("rapidformer.engine", "RapidformerEngine"),
    "RapidformerError": ("rapidformer.errors", "RapidformerError"),
    "TrainingArguments": ("rapidformer.config", "TrainingArguments"),
    "build_train_valid_test_datasets_for_huggingface": (
        "rapidformer.data.pretraining",
        "build_train_valid_test_datasets_for_huggingface",
    ),
    "get_args": ("rapidformer.context", "get_args"),
    "get_logger": ("rapidformer.log", "get_logger"),
    "get_timers": ("rapidformer.context", "get_timers"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'rapidformer' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
