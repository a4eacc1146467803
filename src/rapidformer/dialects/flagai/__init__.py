"""FlagAI: ``from rapidformer.dialects.flagai import Trainer``. Imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rapidformer.dialects.flagai.trainer import FlagAITrainer as Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rapidformer.dialects.flagai.trainer import FlagAITrainer

    return FlagAITrainer
