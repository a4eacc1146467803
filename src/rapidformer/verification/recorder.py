"""Record a run on this rank: an observer that turns updates into a ``Trace``.

It reads gradients when the engine has finished them, so any loop can be recorded unchanged. Joining
a split tensor involves all ranks that hold a slice, so every rank records, in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rapidformer.accel.dropout_seeds import has_dropout
from rapidformer.compat.torch_dispatch import is_in_backward
from rapidformer.dist.collectives import is_alone
from rapidformer.dist.whole import join_whole
from rapidformer.optim.observer import RunObserver
from rapidformer.overlay import list_layers
from rapidformer.verification.steps import StepRecorder, collect_group_setting, peek_at_draws
from rapidformer.verification.trace import AXES, Tensors, Trace


class RecordingFinished(BaseException):
    """Enough updates have been seen. Not an ``Exception``, so a loop's ``except`` lets it pass."""


class Recorder(RunObserver):
    """Observe this many updates of one engine, then stop its run; without a number, all of them."""

    def __init__(self, updates: int | None = None) -> None:
        self.trace = Trace()
        self._updates = updates
        self._engine: Any = None
        self._steps: StepRecorder | None = None
        self._has_dropout = False
        self._loss = self._weight = 0.0
        self._samples = (0, 0)
        self._hooks: list[Any] = []

    def before_compose(self, model: nn.Module) -> None:
        self.trace.facts["model"] = type(model).__name__  # switches extend the class
        self._has_dropout = has_dropout(model)

    def after_compose(self, engine: Any) -> None:
        self._engine = engine
        self._steps = StepRecorder(engine, self.trace.steps)
        model, topology = self._model, engine.runtime.topology
        self.trace.place = {axis: topology.get_rank(axis) for axis in AXES}
        self.trace.start = collect_weights(model)
        self.trace.ties = find_ties(model)
        self.trace.decays = collect_group_setting(engine.updates.optimizer, model, "weight_decay")
        self.trace.draws = [peek_at_draws(engine.device)]
        self.trace.split = [name for name, p in _list_parameters(model).items() if _is_split(p)]
        if not engine.args.compile:  # otherwise the hook would be compiled into the block
            # Without padding, a block's output has another size than the one it is compared with.
            is_unpadded = "unpad" in list_layers(model)
            names = () if is_unpadded else engine.model.parallelized.plan.blocks
            self._hooks = watch_blocks(model, names, self.trace.blocks)
        self.trace.facts |= {
            "switches": list(engine.model.parallelized.switches),
            "device": engine.device.type,
            "micro_batch_size": engine.args.micro_batch_size,
            "sizes": {name: getattr(engine.args, name) for name in ("num_layers", "hidden_size")},
            "tied": [list(group) for group in engine.model.parallelized.plan.tied],
            "parameter_bytes": count_bytes(model),
        }

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self._engine.model.parallelized.model
        return model

    def see_loss(
        self, loss: torch.Tensor, weight: float | torch.Tensor, info: Any, *, is_given: bool
    ) -> None:
        number = float(weight)
        assert self._steps is not None
        self._steps.see_loss(number, info, is_given=is_given)
        if number:  # a mean over no labels is NaN, and contributes nothing
            self._loss += float(loss.detach()) * number
            self._weight += number
        if info is not None:
            self._samples = (self._samples[0] + info.rows, self._samples[1] + info.labels)

    def see_gradients(self) -> None:
        trace, norm = self.trace, self._engine.updates.clock.grad_norm
        trace.losses.append((self._loss, self._weight))
        trace.samples.append(self._samples)
        trace.norms.append(float(norm) if norm is not None else 0.0)
        trace.gradients.append(collect_gradients(self._model))
        assert self._steps is not None
        self._steps.see_gradients()
        if self._has_dropout and len(trace.draws) == 1:
            # A script or a loop may have reseeded since. Harmless where nothing drops out.
            trace.draws.append(peek_at_draws(self._engine.device))
        self._loss = self._weight = 0.0
        self._samples = (0, 0)
        for hook in self._hooks:
            hook.remove()

    def choose_clip(self, max_norm: float, norm: torch.Tensor) -> float:
        assert self._steps is not None
        self._steps.see_clip(max_norm)
        return max_norm

    def see_update(self) -> None:
        if self._updates is not None and len(self.trace.gradients) >= self._updates:
            self.finish()
            raise RecordingFinished

    def finish(self) -> Trace:
        """Record the weights as they are now; every rank must call this."""
        if self._engine is not None:
            self._engine.model.parallelized.settle()
            self.trace.weights = collect_weights(self._model)
        return self.trace


def collect_weights(model: nn.Module) -> Tensors:
    """Every parameter of the model, whole, under each of its names."""
    return _collect(dict(_list_parameters(model)))


def collect_gradients(model: nn.Module) -> Tensors:
    """Every gradient of the model, whole, under each of its parameter's names."""
    parameters = _list_parameters(model)
    present = _find_anywhere({name for name, p in parameters.items() if p.grad is not None})
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
        elif name in present and isinstance(parameter, DTensor):
            # Another rank has a gradient: joining it needs this rank's slice too, as zeros.
            gradients[name] = torch.zeros_like(parameter.detach())
    return _collect(gradients)


def find_ties(model: nn.Module) -> list[list[str]]:
    """Groups of names that are one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in _list_parameters(model).items():
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def count_bytes(model: nn.Module) -> int:
    """This rank's part of the parameters."""
    return sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel() * p.element_size()
        for p in model.parameters()
    )


def watch_blocks(model: nn.Module, names: tuple[str, ...], sizes: dict[str, float]) -> list[Any]:
    """Sum the squares of each block's outputs; returns a handle that stops it when removed."""
    return [
        module.register_forward_hook(_build_hook(name, sizes))
        for name, module in model.named_modules()
        if name in names
    ]


def _build_hook(name: str, sizes: dict[str, float]) -> Any:
    def add(module: nn.Module, given: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        # In a backward pass, a block is only recomputed.
        if isinstance(hidden, torch.Tensor) and not is_in_backward():
            local = hidden.detach()
            local = local.to_local() if isinstance(local, DTensor) else local
            sizes[name] = sizes.get(name, 0.0) + float(local.double().square().sum())

    return add


def _list_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _is_split(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and not all(
        p.is_replicate() for p in parameter.placements
    )


def _find_anywhere(names: set[str]) -> set[str]:
    """The names that any rank of the run has."""
    if is_alone():
        return names
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    return set().union(*everyone)


def _collect(tensors: dict[str, torch.Tensor]) -> Tensors:
    found: dict[int, np.ndarray[Any, Any]] = {}
    for tensor in tensors.values():
        if id(tensor) not in found:
            found[id(tensor)] = _get_whole(tensor)
    return {name: found[id(tensor)] for name, tensor in tensors.items()}


def _get_whole(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    # A copy: a tensor that is whole on every rank shares the parameter's memory.
    return join_whole(tensor).float().cpu().numpy().copy()
