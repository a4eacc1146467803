"""What the parts of a trainer may ask of it: the class itself imports them, so not the reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from rapidformer.dialects.huggingface.arguments import TrainingArguments
from rapidformer.engine import RapidformerEngine

Inputs = dict[str, Any]
Metrics = dict[str, Any]
Keys = list[str] | None
Prediction = tuple[torch.Tensor | None, Any, Any]  # loss, logits, labels


class TrainerInterface(Protocol):
    """What the base classes of a trainer ask of those above them."""

    args: TrainingArguments
    model: nn.Module
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    train_dataloader: Any
    optimizer: Any
    lr_scheduler: Any
    state: TrainerState
    control: TrainerControl
    callbacks: Any
    label_names: list[str]
    compute_metrics: Callable[..., Any] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None
    _is_training: bool
    _ignore_keys: Keys

    @property
    def engine(self) -> RapidformerEngine: ...

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any: ...

    def choose_optimizer(self) -> tuple[Any, Any, Callable[..., Any] | None]: ...

    def run_training_step(self, model: nn.Module, batch: Any) -> torch.Tensor: ...

    def train(self, *, trial: Any = None) -> Any: ...
