"""Record a run on this rank: an observer that turns updates into a ``Trace``.

It reads gradients when the engine has finished them, so any loop can be recorded unchanged. Joining
a split tensor involves all ranks that hold a slice, so every rank records, in the same order. The
optimizer is watched, too: learning rates and clipping are recorded as they reach it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from rapidformer.accel.dropout_seeds import apply_no_dropout, has_dropout
from rapidformer.compat.torch_dispatch import is_in_backward
from rapidformer.config import Settings
from rapidformer.dist.collectives import gather_from_all
from rapidformer.dist.whole import get_shard, join_each
from rapidformer.errors import RapidformerError
from rapidformer.models.plan import find_tied
from rapidformer.optim.observer import RunFinished, RunObserver, observe_runs
from rapidformer.overlay import list_layers
from rapidformer.verification.settings import SMALLEST_EPSILON, Job, change_settings
from rapidformer.verification.trace import AXES, MicroBatchWeight, Step, Tensors, Trace


class Recorder(RunObserver):
    """Observe this many updates of one engine, then stop its run; without a number, all of them."""

    def __init__(self, updates: int | None = None) -> None:
        self.trace = Trace()
        self._updates = updates
        self._engine: Any = None
        self._has_dropout = False
        self._loss = self._weight = 0.0
        self._samples = (0, 0)
        self._micro_batches: list[MicroBatchWeight] = []
        self._size = 0.0
        """The norm of this rank's slices of the gradient, before clipping."""
        self._hooks: list[Any] = []

    def before_compose(self, model: nn.Module) -> None:
        self.trace.facts["model"] = type(model).__name__  # switches extend the class
        self._has_dropout = has_dropout(model)

    def after_compose(self, engine: Any) -> None:
        self._engine = engine
        optimizer, parallelized = engine.updates.optimizer, engine.model.parallelized
        if engine.updates.clock.keeper is None:
            optimizer.register_step_pre_hook(self._see_optimizer)
        model, topology, trace = self._model, engine.runtime.topology, self.trace
        trace.place = {axis: topology.get_rank(axis) for axis in AXES}
        trace.start = collect_weights(model)
        trace.ties = find_tied(model)
        trace.decays = _collect_group_setting(optimizer, model, "weight_decay")
        trace.draws = [_peek_at_draws(engine.device)]
        trace.split = [
            name
            for name, p in _list_parameters(model).items()
            if isinstance(p, DTensor) and not all(place.is_replicate() for place in p.placements)
        ]
        # A hook would be compiled into the block. Without padding, a block's output has another
        # size than the one it is compared with.
        if not parallelized.wants("compilation") and "unpad" not in list_layers(model):
            self._hooks = [
                module.register_forward_hook(_build_hook(name, trace.blocks))
                for name, module in model.named_modules()
                if name in parallelized.plan.blocks
            ]
        trace.facts |= {
            "switches": list(parallelized.switches),
            "device": engine.device.type,
            "micro_batch_size": engine.args.micro_batch_size,
            "sizes": {name: getattr(engine.args, name) for name in ("num_layers", "hidden_size")},
            "tied": [list(group) for group in parallelized.plan.tied],
            "parameter_bytes": count_bytes(model),
        }

    @property
    def _model(self) -> nn.Module:
        return self._engine.model.parallelized.model

    def see_loss(
        self, loss: torch.Tensor, weight: float | torch.Tensor, info: Any, *, is_given: bool
    ) -> None:
        number, labels = float(weight), None
        if info is not None:
            labels = info.count_labels(shifts_labels=self._engine.updates.weights.shifts_labels)
            self._samples = (self._samples[0] + info.rows, self._samples[1] + info.labels)
        self._micro_batches.append(MicroBatchWeight(number, labels, is_given))
        if number:  # a mean over no labels is NaN, and contributes nothing
            self._loss += float(loss.detach()) * number
            self._weight += number

    def see_gradients(self) -> None:
        trace, clock = self.trace, self._engine.updates.clock
        trace.losses.append((self._loss, self._weight))
        trace.samples.append(self._samples)
        loader = self._engine.data.train_loader
        drawn = 0 if loader is None else len(loader.positions)
        trace.facts["samples"] = max(drawn, trace.facts.get("samples", 0))
        norm = clock.grad_norm  # measured each time that it is asked for
        trace.norms.append(0.0 if norm is None else float(norm))
        trace.gradients.append(collect_gradients(self._model))
        total = float(clock.total_weight)
        trace.steps.append(Step(micro_batches=self._micro_batches, total_weight=total))
        self._size = _measure_gradients(self._model)
        if self._has_dropout and len(trace.draws) == 1:
            # A script or a loop may have reseeded since. Harmless where nothing drops out.
            trace.draws.append(_peek_at_draws(self._engine.device))
        self._loss = self._weight = 0.0
        self._samples, self._micro_batches = (0, 0), []
        for hook in self._hooks:
            hook.remove()

    def choose_clip(self, max_norm: float, norm: torch.Tensor) -> float:
        if self.trace.steps:
            self.trace.steps[-1].max_norm = max_norm
        return max_norm

    def _see_optimizer(self, optimizer: Any, *_: Any) -> None:
        if self._engine.updates.clock.is_bypassed or not self.trace.steps:
            return
        step = self.trace.steps[-1]
        step.rates = _collect_group_setting(optimizer, self._model, "lr")
        step.position = getattr(self._engine.updates.lr_scheduler, "last_epoch", None)
        if self._size:
            # Each rank's slices alone: clipping multiplies all of them by the same number.
            step.clip_factor = _measure_gradients(self._model) / self._size

    def see_update(self) -> None:
        if self._updates is not None and len(self.trace.gradients) >= self._updates:
            self.finish()
            raise RunFinished

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
    here = {name for name, p in parameters.items() if p.grad is not None}
    present = set().union(*gather_from_all(here))
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
        elif name in present and isinstance(parameter, DTensor):
            # Another rank has a gradient: joining it needs this rank's slice too, as zeros.
            gradients[name] = torch.zeros_like(parameter.detach())
    return _collect(gradients)


def count_bytes(model: nn.Module) -> int:
    """This rank's part of the parameters."""
    return sum(get_shard(p).numel() * p.element_size() for p in model.parameters())


def _build_hook(name: str, sizes: dict[str, float]) -> Any:
    """Sums the squares of a block's outputs."""

    def add(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        # In a backward pass, a block is only recomputed.
        if isinstance(hidden, torch.Tensor) and not is_in_backward():
            square = get_shard(hidden.detach()).double().square().sum()
            sizes[name] = sizes.get(name, 0.0) + float(square)

    return add


def _collect_group_setting(optimizer: Any, model: nn.Module, setting: str) -> dict[str, float]:
    """A setting of the optimizer's groups, under every name of each parameter."""
    values = {
        id(parameter): float(group[setting])
        for group in optimizer.param_groups
        if setting in group
        for parameter in group["params"]
    }
    return {name: values[id(p)] for name, p in _list_parameters(model).items() if id(p) in values}


def _peek_at_draws(device: torch.device) -> list[float]:
    """The next random numbers that dropout would use; they stay the next ones."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        drawn: list[float] = torch.rand(4, device=device).tolist()
    return drawn


def _measure_gradients(model: nn.Module) -> float:
    """The norm of this rank's slices."""
    slices = [get_shard(p.grad) for p in model.parameters() if p.grad is not None]
    norms = [float(torch.linalg.vector_norm(s, dtype=torch.float64)) for s in slices]
    return math.sqrt(sum(norm**2 for norm in norms))


def _list_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _collect(tensors: dict[str, torch.Tensor]) -> Tensors:
    unique = {id(tensor): tensor for tensor in tensors.values()}
    ids = list(unique)
    arrays: dict[int, np.ndarray[Any, Any]] = {
        # A copy: a tensor that is whole on every rank shares the parameter's memory.
        ids[index]: whole.float().cpu().numpy().copy()
        for index, whole in join_each(unique.values())
    }
    return {name: arrays[id(tensor)] for name, tensor in tensors.items()}


# Half of fp32's last bit.
_ROUND_OFF = 6e-8
# Gradients are clipped to this fraction of their norm, at most.
_CLIPPED = 0.5
# What a weight that decays loses in an update, at least.
_VISIBLE_DECAY = 1e-2


class VerifiedRun(Recorder):
    """Changes the settings as the job requires, and observes the updates."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.updates)
        self._job = job

    def change_settings(self, args: Settings) -> Settings:
        return change_settings(args, self._job)

    def before_compose(self, model: nn.Module) -> None:
        super().before_compose(model)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
            model.float()
        apply_no_dropout(model, changes_config=True)

    def after_compose(self, engine: Any) -> None:
        super().after_compose(engine)
        for group in engine.updates.optimizer.param_groups:
            if isinstance(group.get("eps"), float):
                group["eps"] = max(group["eps"], SMALLEST_EPSILON)
        apply_visible_decay(engine.updates.optimizer)
        if self._job.kind == "disturbed":
            # A forward pass without randomness is not affected.
            seed = engine.args.seed + 54321
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
        if self._job.kind == "shaken":
            apply_round_off(self._model)

    def choose_clip(self, max_norm: float, norm: torch.Tensor) -> float:
        """Clip every gradient of a run that clips at all: one left out would not show otherwise."""
        asked = super().choose_clip(max_norm, norm)
        return min(asked, _CLIPPED * float(norm)) if asked > 0 else asked

    def see_update(self) -> None:
        # At every update: a short run may stop, and leave the other ranks, before the last one.
        self.finish()
        super().see_update()


def record_run(job: Job, train: Callable[[], None]) -> Trace:
    """Let ``train`` run until enough updates have been seen."""
    run = VerifiedRun(job)
    with observe_runs(run):
        train()
    if not run.trace.gradients:
        raise RapidformerError(
            "the run ended before its first optimizer step: there is nothing to verify. Does it "
            "train with an engine (engine.backward and optimizer.step), on enough data for a step?"
        )
    if not any(rows for rows, _ in run.trace.samples) and run.trace.place["data"] == 0:
        raise RapidformerError(
            "the run's batches do not come from the engine, so one process would see other "
            "samples: use engine.data.build_loader(...), or pass the DataLoader to "
            "engine.compose(train_dataloader=...)."
        )
    return run.trace


def apply_round_off(model: nn.Module) -> None:
    """Change every weight in its last bits, to measure what round-off alone does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _ROUND_OFF
            parameter.mul_(1.0 + noise.to(parameter.device))


def apply_visible_decay(optimizer: Optimizer) -> None:
    """Let an optimizer's own decay be visible: at usual rates, it takes off millionths."""
    for group in optimizer.param_groups:
        rate, decay = float(group.get("initial_lr", group["lr"])), group.get("weight_decay", 0.0)
        is_apart = group.get("decoupled_weight_decay") is True or isinstance(optimizer, SGD)
        if rate > 0 and decay > 0 and is_apart:
            group["weight_decay"] = max(decay, _VISIBLE_DECAY / rate)
