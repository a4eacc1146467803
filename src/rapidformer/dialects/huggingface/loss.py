"""The loss of a micro-batch, in the ways in which users' code gives it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.dialects.accelerate.processes import ProcessVerbs
from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.models.own_loss import shifts_labels


def get_loss(outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss that a model has computed itself: its first output."""
    if isinstance(outputs, Mapping) and "loss" not in outputs:
        raise RapidformerError(
            f"the model returned no loss, only {', '.join(outputs)}. It was given "
            f"{', '.join(inputs)}: add labels to the data, pass compute_loss_func=, or override "
            "compute_loss."
        )
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]


def count_labels(model: nn.Module, inputs: Any) -> torch.Tensor | None:
    """Labels of a micro-batch, counted on the device; None where there are none."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, torch.Tensor):
        return None
    if labels.is_floating_point():
        return torch.full((), len(labels), device=labels.device)
    counted = labels[..., 1:] if shifts_labels(model) and labels.dim() > 1 else labels
    return counted.ne(IGNORED_LABEL).sum()


def call_with_count(function: Callable[..., Any], *arguments: Any, count: Any) -> Any:
    """Call a user's method with the number of labels, if it takes that: older ones do not."""
    plain = function.func if isinstance(function, functools.partial) else function
    # The cache must not keep a bound method, and so a trainer and its model, alive.
    if _takes_count(getattr(plain, "__func__", plain)):
        return function(*arguments, num_items_in_batch=count)
    return function(*arguments)


@functools.cache
def _takes_count(function: Callable[..., Any]) -> bool:
    return takes(function, "num_items_in_batch")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name, or takes any."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class TrainerAccelerator(ProcessVerbs):
    """``self.accelerator`` of a trainer; what only asks about processes needs no engine."""

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer
        self._losses: list[torch.Tensor] = []

    @property
    def engine(self) -> RapidformerEngine:  # type: ignore[override]
        return self._trainer.engine

    @property
    def num_processes(self) -> int:
        return self._trainer.args.world_size

    @property
    def process_index(self) -> int:
        return self._trainer.args.process_index

    @property
    def device(self) -> torch.device:
        return self._trainer.args.device

    def backward(self, loss: torch.Tensor, **settings: Any) -> None:
        """Back-propagate now, or when a pipeline's schedule does; several losses add up."""
        loss = loss.mean() if loss.dim() else loss
        if not self._trainer.is_in_train:
            if self.num_processes > 1:
                raise RapidformerError(
                    "backward() outside train() works in one process: only the loop sums the "
                    "gradients of several."
                )
            loss.backward()
            return
        self._losses.append(loss.detach())
        if self.engine.model.parallelized.pipeline is None:
            self.engine.updates.backward_within(loss)
        else:
            self._losses[-1] = loss

    def take(self, returned: torch.Tensor) -> torch.Tensor:
        """The loss of a step: its value if ``backward`` has run, otherwise with its graph."""
        losses, self._losses = self._losses, []
        is_loss = isinstance(returned, torch.Tensor)
        if losses and self.engine.model.parallelized.pipeline is None and is_loss:
            return returned.detach().mean()
        if losses:
            return torch.stack(losses).sum()
        if not is_loss or not returned.requires_grad:
            raise RapidformerError(
                "training_step must return the loss with its graph, or call "
                "self.accelerator.backward(loss): loss.backward() would bypass accumulation and "
                "the other processes."
            )
        return returned.mean() if returned.dim() else returned

    def unwrap_model(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model: nothing is ever wrapped."""
        return model

    def __getattr__(self, name: str) -> Any:
        if name == "_trainer" or name.startswith("__"):  # a copy is made: it needs no engine
            raise AttributeError(name)
        return getattr(self.engine, name)
