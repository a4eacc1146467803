"""MindFormers: ``from rapidformer.dialects.mindformers import Trainer, init_context``, and others.

They are imported on first use. MindSpore's launchers set RANK_ID and RANK_SIZE instead of torch's
variables: ``init_context``, ``TrainingArguments`` and ``Trainer`` adopt them, the import does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rapidformer.dialects.mindformers.context import (
        ContextConfig,
        ParallelContextConfig,
        init_context,
    )
    from rapidformer.dialects.mindformers.settings import MindFormersArguments as TrainingArguments
    from rapidformer.dialects.mindformers.trainer import MindFormersTrainer as Trainer

__all__ = ["ContextConfig", "ParallelContextConfig", "Trainer", "TrainingArguments", "init_context"]

_RENAMED = {
    "Trainer": ("trainer", "MindFormersTrainer"),
    "TrainingArguments": ("settings", "MindFormersArguments"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, name_there = _RENAMED.get(name, ("context", name))
    return getattr(importlib.import_module(f"{__name__}.{module}"), name_there)
