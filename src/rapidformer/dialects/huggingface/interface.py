"""What the parts of a trainer may ask of it: the class itself imports them, so not the reverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from rapidformer.config import Settings
from rapidformer.dialects.huggingface.arguments import TrainingArguments
from rapidformer.engine import RapidformerEngine
from rapidformer.objectives import Context, Objective

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
    accelerator: Any
    label_names: list[str]
    compute_metrics: Callable[..., Any] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None
    context: Context | None
    smooths_labels: bool
    _is_training: bool
    _ignore_keys: Keys
    _engine: RapidformerEngine | None

    @property
    def engine(self) -> RapidformerEngine: ...

    @property
    def is_in_train(self) -> bool: ...

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any: ...

    def overrides(self, name: str) -> bool: ...

    def build_objective(self) -> Objective | None: ...

    def provide_frozen_models(self) -> Mapping[str, nn.Module]: ...

    def build_settings(self) -> Settings: ...

    def compose(self, engine: RapidformerEngine) -> None: ...

    def step_schedule(self, metrics: Mapping[str, float]) -> None: ...

    def log_results(self, unlogged: dict[str, float] | None = None) -> Metrics: ...

    def run_training_step(self, model: nn.Module, batch: Any) -> torch.Tensor: ...

    def train(self, *, trial: Any = None) -> Any: ...
