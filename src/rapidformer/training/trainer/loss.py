"""The loss of a micro-batch, in the ways in which users' code gives it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rapidformer.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.models.plan import shifts_labels

_IGNORED = -100


def get_loss(outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss that a model has computed itself: its first output."""
    if isinstance(outputs, Mapping) and "loss" not in outputs:
        raise RapidformerError(
            f"the model returned no loss, only {', '.join(outputs)}. It was given "
            f"{', '.join(inputs)}: add labels to the data, pass compute_loss_func=, or override "
            "compute_loss."
        )
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    return loss


def count_labels(model: nn.Module, inputs: Any) -> torch.Tensor | None:
    """Labels of a micro-batch, counted on the device; None where there are none."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, torch.Tensor):
        return None
    if labels.is_floating_point():
        return torch.full((), len(labels), device=labels.device)
    counted = labels[..., 1:] if shifts_labels(model) and labels.dim() > 1 else labels
    return counted.ne(_IGNORED).sum()


def call_with_count(function: Callable[..., Any], *arguments: Any, count: Any) -> Any:
    """Call a user's method with the number of labels, if it takes that: older ones do not."""
    if _takes_count(function):
        return function(*arguments, num_items_in_batch=count)
    return function(*arguments)


def _takes_count(function: Callable[..., Any]) -> bool:
    # The cache must not keep a bound method, and so a trainer and its model, alive.
    if isinstance(function, functools.partial):
        function = function.func
    return _find_count(getattr(function, "__func__", function))


@functools.cache
def _find_count(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any or "num_items_in_batch" in parameters


class LossRecorder:
    """``self.accelerator`` of a subclass: the engine, but ``backward`` waits for the loop.

    The loop knows which micro-batch is the last of its update and weighs each by its labels, so it
    runs the backward pass when ``training_step`` returns.
    """

    def __init__(self, engine: RapidformerEngine) -> None:
        self._engine = engine
        self.losses: list[torch.Tensor] = []

    def backward(self, loss: torch.Tensor, **settings: Any) -> None:
        """Remember the loss; several in a step are added up."""
        self.losses.append(loss.mean() if loss.dim() else loss)

    def take(self, returned: torch.Tensor) -> torch.Tensor:
        """The loss of a step: what was given to ``backward``, or else what was returned."""
        losses, self.losses = self.losses, []
        if losses:
            return torch.stack(losses).sum()
        if not isinstance(returned, torch.Tensor) or not returned.requires_grad:
            raise RapidformerError(
                "training_step must return the loss with its graph, or call "
                "self.accelerator.backward(loss): loss.backward() would bypass accumulation and "
                "the other processes."
            )
        return returned.mean() if returned.dim() else returned

    @property
    def is_main_process(self) -> bool:
        return self._engine.is_main

    @property
    def num_processes(self) -> int:
        return self._engine.args.world_size

    def wait_for_everyone(self) -> None:
        self._engine.wait_for_all()

    def unwrap_model(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model: nothing is ever wrapped."""
        return model

    def gather_for_metrics(self, values: Any) -> Any:
        """Every process's rows, each example of the data once; also of nested lists and dicts."""
        if isinstance(values, Mapping):
            return {name: self.gather_for_metrics(value) for name, value in values.items()}
        if isinstance(values, (list, tuple)):
            return type(values)(self.gather_for_metrics(value) for value in values)
        return self._engine.gather(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
