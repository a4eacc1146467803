"""The training arguments of sentence-transformers: Hugging Face's, and what texts need besides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rapidformer.dialects.huggingface.arguments import TrainingArguments, takes_former_names
from rapidformer.errors import ConfigurationError

_PLAIN, _NO_DUPLICATES = "batch_sampler", "no_duplicates"


@dataclass(repr=False)
class PairArguments(TrainingArguments):
    """What the arguments of all trainers share."""

    batch_sampler: str = _PLAIN
    """``no_duplicates``: equal texts are no negatives of each other."""
    multi_dataset_batch_sampler: str = "proportional"
    prompts: dict[str, str] | str | None = None
    """Text before the texts of each column, or of all of them."""
    learning_rate_mapping: dict[str, float] = field(default_factory=dict)
    router_mapping: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        sampler = str(getattr(self.batch_sampler, "value", self.batch_sampler))
        if sampler not in (_PLAIN, _NO_DUPLICATES):
            raise ConfigurationError(
                f"batch_sampler={sampler!r} is not supported: use {_PLAIN!r} or {_NO_DUPLICATES!r}."
            )
        for name in ("learning_rate_mapping", "router_mapping"):
            if getattr(self, name):
                raise ConfigurationError(f"{name} is not supported: one model learns at one rate.")
        self.batch_sampler = sampler

    @property
    def masks_duplicates(self) -> bool:
        return bool(self.batch_sampler == _NO_DUPLICATES)


@takes_former_names
@dataclass(repr=False)
class SentenceTransformerTrainingArguments(PairArguments):
    """How to learn vectors."""


@takes_former_names
@dataclass(repr=False)
class CrossEncoderTrainingArguments(PairArguments):
    """How to learn scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts:
            raise ConfigurationError(
                "CrossEncoderTrainingArguments(prompts=...) is not supported: put the prompt into "
                "the texts."
            )
