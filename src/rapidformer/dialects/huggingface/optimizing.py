"""Optimizers and schedules by Hugging Face's names, which a subclass may override.

What the engine has by itself (None) is left to the engine, which can then apply its switches to it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import get_scheduler

from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.dialects.huggingface.settings import TORCH_OPTIMIZERS, has_own_curve
from rapidformer.errors import RapidformerError
from rapidformer.optim.optimizers import build_optimizer, group_parameters


class OptimizerMethods(TrainerInterface):
    """The part of ``Trainer`` that makes optimizers and schedules."""

    _given_optimizers: tuple[Optimizer | None, Any]
    _optimizer_class: tuple[type[Optimizer], dict[str, Any]] | None

    @abstractmethod
    def _overrides(self, name: str) -> bool: ...

    def choose_optimizer(self) -> tuple[Optimizer | None, Any, Callable[..., Any] | None]:
        """Optimizer, scheduler, and what makes the scheduler: None is left to the engine."""
        self.optimizer, self.lr_scheduler = self._given_optimizers
        steps = self.engine.data.get_train_iters() or 0
        if self._overrides("create_optimizer_and_scheduler"):
            self.create_optimizer_and_scheduler(steps)
        elif self.optimizer is None and (
            self._overrides("create_optimizer") or self._overrides("create_scheduler")
            or self._optimizer_class is not None or self.args.optim in TORCH_OPTIMIZERS
        ):  # fmt: skip
            self.create_optimizer()
        make = None
        if self.lr_scheduler is None and (
            self._overrides("create_scheduler") or not has_own_curve(self.args)
        ):
            make = partial(self.create_scheduler, steps)
        return self.optimizer, self.lr_scheduler, make

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make both; a subclass may set ``self.optimizer`` and ``self.lr_scheduler`` instead."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make the optimizer that the arguments describe, over the model's parameters."""
        if self.optimizer is None:
            self.optimizer = self._build_optimizer(model or self.model)
        return self.optimizer  # type: ignore[no-any-return]

    def _build_optimizer(self, model: nn.Module) -> Optimizer:
        args = self.args
        groups = group_parameters(model, args.weight_decay)
        if self._optimizer_class is not None:
            cls, details = self._optimizer_class
            return cls(groups, **{"lr": args.learning_rate, **details})
        if args.optim in TORCH_OPTIMIZERS:
            named: Any = getattr(torch.optim, TORCH_OPTIMIZERS[args.optim])
            return named(groups, lr=args.learning_rate)  # type: ignore[no-any-return]
        return build_optimizer(model, self.engine.args)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Make the schedule that the arguments describe, for a run of this many updates."""
        if self.lr_scheduler is None:
            optimizer = optimizer if optimizer is not None else self.optimizer
            if optimizer is None:
                raise RapidformerError(
                    "create_scheduler() needs the optimizer: call create_optimizer()."
                )
            details: Any = self.args.lr_scheduler_kwargs
            warmup = self.args.get_warmup_steps(num_training_steps)
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type, optimizer, warmup, num_training_steps, details
            )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """What weight decay applies to: matrices, not biases and norms (one dimension)."""
        return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
