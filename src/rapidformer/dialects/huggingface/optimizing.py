"""Optimizers and schedules by Hugging Face's names, where the engine has none of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rapidformer.config import Settings
from rapidformer.dialects.huggingface.arguments import TrainingArguments
from rapidformer.dialects.huggingface.settings import TORCH_OPTIMIZERS
from rapidformer.errors import RapidformerError
from rapidformer.optim.optimizers import build_optimizer, group_parameters


def build_named_optimizer(
    model: nn.Module,
    arguments: TrainingArguments,
    settings: Settings,
    given: tuple[type[Optimizer], dict[str, Any]] | None = None,
) -> Optimizer:
    """The optimizer of the arguments, or the class that was given, over the model's parameters."""
    if given is not None:
        cls, details = given
        groups = group_parameters(model, arguments.weight_decay)
        return cls(groups, **{"lr": arguments.learning_rate, **details})
    if arguments.optim in TORCH_OPTIMIZERS:
        named: type[Optimizer] = getattr(torch.optim, TORCH_OPTIMIZERS[arguments.optim])
        groups = group_parameters(model, arguments.weight_decay)
        return named(groups, lr=arguments.learning_rate)  # type: ignore[call-arg]
    return build_optimizer(model, settings)


def build_named_schedule(
    arguments: TrainingArguments, optimizer: Optimizer | None, num_training_steps: int
) -> Any:
    """transformers' own schedule of that name."""
    from transformers import get_scheduler

    if optimizer is None:
        raise RapidformerError("create_scheduler() needs the optimizer: call create_optimizer().")
    details: Any = arguments.lr_scheduler_kwargs
    return get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.get_warmup_steps(num_training_steps),
        num_training_steps=num_training_steps,
        scheduler_specific_kwargs=details,
    )


def list_decayed(model: nn.Module) -> list[str]:
    """Matrices; biases and norms (one dimension) are left out."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
