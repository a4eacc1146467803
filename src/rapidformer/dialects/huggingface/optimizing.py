"""Optimizers and schedules by Hugging Face's names, which a subclass may override.

What the engine has by itself (None) is left to the engine, which can then apply its switches to it.
As in transformers, a second ``train()`` starts a new schedule and keeps the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import get_scheduler
from transformers.optimization import Adafactor, GreedyLR

from rapidformer.config import resolve
from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.dialects.huggingface.settings import MADE_HERE, has_own_curve
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.optim.optimizers import build_optimizer

_States = dict[str, dict[str, Any]]


class MetricSchedule:
    """A schedule that looks at metrics, as the engine sees it: an update does not move it."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        self.state_dict, self.load_state_dict = schedule.state_dict, schedule.load_state_dict

    def step(self) -> None:
        """The trainer moves it after an evaluation."""


def hide_metrics(schedule: Any) -> Any:
    """What the engine is given for a schedule."""
    looks = isinstance(schedule, (ReduceLROnPlateau, GreedyLR))
    return MetricSchedule(schedule) if looks else schedule


class OptimizerMethods(TrainerInterface):
    """The part of ``Trainer`` that makes optimizers and schedules."""

    optimizer: Any
    lr_scheduler: Any
    _made: tuple[Any, Any] = (None, None)
    """The optimizer and the schedule that are not the user's own."""
    _trained_optimizer: Optimizer | None = None
    _optimizer_class: tuple[type[Optimizer], dict[str, Any]] | None

    def choose_optimizer(self) -> tuple[Optimizer | None, Any, Callable[..., Any] | None]:
        """Optimizer, scheduler, and what makes the scheduler: None is left to the engine."""
        if self.optimizer is self._made[0]:
            self.optimizer = None
        if self.lr_scheduler is self._made[1]:
            self.lr_scheduler = None
        steps = self.engine.data.get_train_iters() or 0
        if self.overrides("create_optimizer_and_scheduler"):
            self.create_optimizer_and_scheduler(steps)
        elif self.overrides("create_optimizer") or (self.optimizer is None and (
            self.overrides("create_scheduler") or self._decays_by_name()
            or self._optimizer_class is not None or self.args.optim in MADE_HERE
        )):  # fmt: skip
            self.create_optimizer()
        make = None
        if self.lr_scheduler is None and (
            self.overrides("create_scheduler") or not has_own_curve(self.args)
        ):
            make = partial(self.create_scheduler, steps)
        return self.optimizer, self.lr_scheduler, make

    def compose(self, engine: RapidformerEngine) -> None:
        """Switch the model on with its optimizer and schedule."""
        trained, states = self.optimizer, self._take_states()
        optimizer, scheduler, make = self.choose_optimizer()
        if optimizer is not None and optimizer is not trained:
            states = {}  # a subclass has made a new one
        _, self.optimizer, composed = engine.compose(
            self.model, optimizer,
            None if make is None else lambda optimizer: hide_metrics(make(optimizer)),
            lr_scheduler=hide_metrics(scheduler),
        )[:3]  # fmt: skip
        self.lr_scheduler = getattr(composed, "schedule", composed)
        self._made = (
            self.optimizer if optimizer is None else None,
            self.lr_scheduler if scheduler is None else None,
        )
        self._give_states(states)

    def step_schedule(self, metrics: Mapping[str, float]) -> None:
        """Move a schedule that looks at metrics, after an evaluation."""
        if isinstance(hide_metrics(self.lr_scheduler), MetricSchedule):
            name = (self.args.metric_for_best_model or "loss").removeprefix("eval_")
            if f"eval_{name}" not in metrics:
                raise ConfigurationError(
                    f"the schedule looks at metric_for_best_model={name!r}, and an evaluation "
                    f"gives {', '.join(metrics)}."
                )
            self.lr_scheduler.step(metrics[f"eval_{name}"])

    def _take_states(self) -> _States:
        """The state of an optimizer that has trained, by the parameters' names."""
        optimizer = self._trained_optimizer
        if optimizer is None or self.optimizer is not optimizer:
            return {}
        names = {id(p): name for name, p in self.model.named_parameters()}
        states = {names[id(p)]: s for p, s in optimizer.state.items() if id(p) in names}
        optimizer.state.clear()
        return states

    def _give_states(self, states: _States) -> None:
        """Give it back, for the parameters of now."""
        if not states:
            return
        names = {id(p): name for name, p in self.model.named_parameters()}
        content, trained = self.optimizer.state_dict(), self.optimizer.param_groups
        indices = (index for group in content["param_groups"] for index in group["params"])
        parameters = (p for group in trained for p in group["params"])
        content["state"] = {
            index: {key: _split_like(v, p) for key, v in states[names[id(p)]].items()}
            for index, p in zip(indices, parameters, strict=True)
            if names.get(id(p)) in states
        }
        self.optimizer.load_state_dict(content)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make both, or let a subclass set them; ``train()`` makes a new schedule for its run."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make the optimizer that the arguments describe, over the model's parameters."""
        if self.optimizer is None:
            self.optimizer = self._build_optimizer(model or self.model)
        return self.optimizer

    def _build_optimizer(self, model: nn.Module) -> Optimizer:
        args = self.args
        decayed, named = set(self.get_decay_parameter_names(model)), model.named_parameters()
        trained = [(name in decayed, p) for name, p in named if p.requires_grad]
        groups: list[Any] = [
            {"params": [p for is_decayed, p in trained if is_decayed is decays],
             "weight_decay": args.weight_decay if decays else 0.0}
            for decays in (True, False)
        ]  # fmt: skip
        if self._optimizer_class is not None:
            cls, details = self._optimizer_class
            return cls(groups, **{"lr": args.learning_rate, **details})
        if args.optim == "adafactor":
            fixed = {"scale_parameter": False, "relative_step": False}
            return Adafactor(groups, lr=args.learning_rate, **fixed)
        if args.optim in MADE_HERE:
            named_class: Any = getattr(torch.optim, MADE_HERE[args.optim])
            return named_class(groups, lr=args.learning_rate)
        settings = resolve(self.build_settings()) if self._engine is None else self._engine.args
        optimizer = build_optimizer(model, settings)
        if self._decays_by_name():
            optimizer.param_groups.clear()
            for group in groups:
                optimizer.add_param_group(group)
        return optimizer

    def _decays_by_name(self) -> bool:
        """Whether decay goes by names: T5's relative positions are a matrix that is not decayed."""
        decayed = set(self.get_decay_parameter_names(self.model) if self.args.weight_decay else ())
        named = self.model.named_parameters()
        return bool(decayed) and any(
            (name in decayed) is not (p.dim() > 1) for name, p in named if p.requires_grad
        )

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
            self._made = (self._made[0], self.lr_scheduler)
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """What weight decay applies to, by transformers' rule: neither biases nor norms."""
        return transformers.Trainer.get_decay_parameter_names(self, model)


def _split_like(value: Any, parameter: nn.Parameter) -> Any:
    """A part of an optimizer's state, split over the ranks as its parameter is now."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if isinstance(value, DTensor) is not isinstance(parameter, DTensor):
        raise RapidformerError(
            "train() was called again with other sharding, which the optimizer's state does not "
            "follow: make a new Trainer, with resume_from_checkpoint=True to keep the state."
        )
    if isinstance(value, DTensor):
        assert isinstance(parameter, DTensor)
        return DTensor.from_local(
            value.to_local(), parameter.device_mesh, parameter.placements,
            run_check=False, shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
    return value
