"""What the parts of a trainer may ask of it: the class itself imports them, so not the reverse.

``Trainer``'s base classes inherit ``TrainerInterface``, so a ``Trainer`` without one of its methods
cannot be created.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from rapidformer.dialects.huggingface.arguments import TrainingArguments
from rapidformer.engine import RapidformerEngine


class TrainerInterface(Protocol):
    """A trainer as its base classes, its loop, its callbacks and its evaluation see it."""

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
    _ignore_keys: list[str] | None

    @property
    @abstractmethod
    def engine(self) -> RapidformerEngine: ...

    @abstractmethod
    def get_train_dataloader(self) -> Any: ...

    @abstractmethod
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any: ...

    @abstractmethod
    def get_test_dataloader(self, test_dataset: Any) -> Any: ...

    @abstractmethod
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any: ...

    @abstractmethod
    def choose_optimizer(self) -> tuple[Any, Any, Callable[..., Any] | None]: ...

    @abstractmethod
    def run_training_step(self, model: nn.Module, batch: Any) -> torch.Tensor: ...

    @abstractmethod
    def log(self, logs: dict[str, float]) -> None: ...

    @abstractmethod
    def save_state(self) -> None: ...

    @abstractmethod
    def evaluate_in_training(self) -> dict[str, Any]: ...

    @abstractmethod
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
