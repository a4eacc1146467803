"""What the parts of a trainer may ask of it: the class itself imports them, so not the reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from rapidformer.engine import RapidformerEngine
from rapidformer.training.trainer.arguments import TrainingArguments


class TrainerInterface(Protocol):
    """A trainer as its loop, its callbacks and its evaluation see it."""

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
    compute_metrics: Callable[..., Any] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None

    @property
    def engine(self) -> RapidformerEngine: ...

    def get_train_dataloader(self) -> Any: ...

    def choose_optimizer(self) -> tuple[Any, Any, Callable[..., Any] | None]: ...

    def run_training_step(self, model: nn.Module, batch: Any) -> torch.Tensor: ...

    def log(self, logs: dict[str, float]) -> None: ...

    def save_state(self) -> None: ...

    def evaluate_in_training(self) -> dict[str, Any]: ...

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]: ...


class SearchableTrainer(Protocol):
    """A trainer as a search for hyperparameters sees it."""

    args: TrainingArguments
    state: TrainerState

    def train(self, *, trial: Any) -> Any: ...

    def evaluate(self) -> Any: ...

    def add_callback(self, callback: Any) -> None: ...

    def remove_callback(self, callback: Any) -> None: ...
