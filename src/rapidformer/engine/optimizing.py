"""Optimizer, schedule and guard of a run, the user's or the settings', extended in place."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import LRScheduler

from rapidformer.accel.parallelize import Parallelized
from rapidformer.checkpoint.state import bypass_clock
from rapidformer.compat.torch_optimizers import has_hooks
from rapidformer.config import Settings
from rapidformer.config.sections import (
    AccelerationArguments,
    OptimizerArguments,
    TrainingLengthArguments,
)
from rapidformer.engine.runtime import Runtime
from rapidformer.errors import ConfigurationError
from rapidformer.log import get_logger
from rapidformer.optim import takeover
from rapidformer.optim.guard import (
    BadUpdate,
    LossGuard,
    LossScaler,
    RecentValues,
    describe_bad_batch,
)
from rapidformer.optim.observer import RunObserver, get_observer
from rapidformer.optim.optimizers import build_optimizer, group_parameters, uses_kernel
from rapidformer.optim.schedule import build_scheduler, fill_training_steps
from rapidformer.optim.update import UpdateClock


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a script passes to ``compose`` besides its model; None: as the settings say."""

    optimizer: Optimizer | None = None
    lr_scheduler_fn: Callable[..., Any] | None = None
    """Makes the schedule of an optimizer."""
    lr_scheduler: Any = None
    """A schedule that is there already."""
    train_iters: int | None = None
    """Updates of the whole run, where they are known."""
    count_samples: Callable[[int], int] = lambda updates: updates
    """How many samples the first so many updates have."""

    @property
    def schedule(self) -> Any:
        return self.lr_scheduler_fn or self.lr_scheduler


def prepare_optimizer(
    wanted: Wanted,
    parallelized: Parallelized,
    names: Mapping[int, str],
    args: Settings,
    runtime: Runtime,
    clock: UpdateClock,
) -> Optimizer:
    """The optimizer over the model's current parameters; DeepSpeed has taken it over by then."""
    optimizer, model, deepspeed = wanted.optimizer, parallelized.model, parallelized.deepspeed
    if deepspeed is not None:
        deepspeed.check_given(optimizer, has_schedule=wanted.schedule is not None)
    if optimizer is not None:
        parallelized.applied.plain.follow(optimizer)
        takeover.repoint_optimizer(optimizer, model, names)
        check_given_optimizer(optimizer)
    elif deepspeed is None or not deepspeed.has_own_optimizer:
        optimizer = build_optimizer(model, args)
        parallelized.applied.plain.follow(optimizer)
        if uses_kernel(optimizer):
            parallelized.applied.add_part("AdamW kernel")
    if deepspeed is not None:
        groups = group_parameters(deepspeed.model, args.weight_decay)
        optimizer = deepspeed.start(optimizer, groups, functools.partial(bypass_clock, clock))
        clock.keeper = deepspeed
    assert optimizer is not None
    if runtime.topology.expert > 1:
        first = len(optimizer.param_groups)
        takeover.split_groups_by_mesh(optimizer, wanted.lr_scheduler)
        end = len(optimizer.param_groups)
        parallelized.applied.on_close(takeover.drop_groups, weakref.ref(optimizer), first, end)
    parallelized.watch_updates(optimizer)
    return optimizer


def prepare_scheduler(
    wanted: Wanted, optimizer: Optimizer, parallelized: Parallelized, args: OptimizerArguments
) -> LRScheduler:
    """The schedule; creating one patches ``optimizer.step``, so it comes before the take-over."""
    if wanted.lr_scheduler is not None:
        return wanted.lr_scheduler
    function = wanted.lr_scheduler_fn
    if function is not None:
        if isinstance(function, functools.partial):
            function = fill_training_steps(function, wanted.train_iters)
        return function(optimizer)
    deepspeed, length = parallelized.deepspeed, wanted.train_iters
    of_file: Any = deepspeed and deepspeed.build_scheduler(optimizer, length)
    if of_file is not None:
        return of_file
    count_samples = wanted.count_samples
    return build_scheduler(optimizer, args, train_iters=length, count_samples=count_samples)


def take_over(
    optimizer: Optimizer,
    scheduler: LRScheduler,
    parallelized: Parallelized,
    clip_grad: float,
    clock: UpdateClock,
    scaler: LossScaler | None,
) -> None:
    """Let both follow the clock until the engine closes."""
    on_close = parallelized.applied.on_close
    on_close(takeover.give_back, weakref.ref(optimizer), vars(optimizer).get("step"))
    on_close(takeover.give_back, weakref.ref(scheduler))
    clips = takeover.take_over_optimizer(
        optimizer, clock, clip_grad=clip_grad, scaler=scaler,
        clips_in_step=parallelized.wants("clipping in the step"),
    )  # fmt: skip
    takeover.take_over_scheduler(scheduler, clock)
    parts = {
        "update clock": True,
        "loss scaling": scaler is not None,
        "clipping in the step": clips,
    }
    for name, is_on in parts.items():
        if is_on:
            parallelized.applied.add_part(name)


def build_guard(
    recent: RecentValues,
    model: nn.Module,
    optimizer: Optimizer,
    args: TrainingLengthArguments,
    runtime: Runtime,
    is_own_loop: bool,
) -> LossGuard | None:
    """What judges every update; a run that stops at a bad loss needs none."""
    policy = args.on_bad_loss
    if policy == "stop" or (policy == "rollback" and is_own_loop):
        return None
    topology, prevents = runtime.topology, policy == "skip"
    return LossGuard(recent, model, optimizer, topology, runtime.device, prevents=prevents)


def report_skipped(
    clock: UpdateClock, list_samples: Callable[[], list[int]], is_main: bool, bad: BadUpdate
) -> None:
    """Name the batch that the guard of a user's own loop has skipped."""
    what = describe_bad_batch(bad.reason, clock.updates + 1, list_samples())
    if is_main:
        get_logger().warning(f"{what}: the batch was skipped.")


def build_scaler(args: AccelerationArguments) -> LossScaler:
    """What keeps small gradients out of fp16's underflow."""
    return LossScaler(
        fixed=args.loss_scale, initial=args.initial_loss_scale, minimum=args.min_loss_scale,
        window=args.loss_scale_window, hysteresis=args.hysteresis,
    )  # fmt: skip


_ELEMENTWISE = (Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, SGD)
_STEPS = 3
# Round-off is far below it, another update far above.
_TOLERANCE = 1e-3

Layout = tuple[DeviceMesh, tuple[Shard | Replicate, ...], int]
"""A mesh, where each of its axes splits, and the number of dimensions."""


def check_given_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that does not update a sharded weight as it would the whole one."""
    # torch's fused SGD does not know sharded tensors; its fused Adam does.
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if type(optimizer) in _ELEMENTWISE and not (is_fused and type(optimizer) is SGD):
        return
    tried: set[Layout] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, DTensor):
                continue
            if isinstance(optimizer, Muon):
                # Its bf16 products round differently on shards: by 3% of an update, but not always
                # in a matrix as small as the probe's.
                raise ConfigurationError(_explain("Muon", "rounds differently on sharded weights"))
            placements = tuple(
                Replicate() if placement.is_replicate() else Shard(getattr(placement, "dim", 0))
                for placement in parameter.placements
            )
            layout = parameter.device_mesh, placements, parameter.dim()
            if layout not in tried:
                tried.add(layout)
                _try(optimizer, group, layout)


def _try(optimizer: Optimizer, group: dict[str, Any], layout: Layout) -> None:
    mesh, placements, dimensions = layout
    shape = (4 * mesh.size(),) * dimensions
    count = torch.Size(shape).numel()
    start = torch.arange(count, dtype=torch.float32, device=mesh.device_type).sin().view(shape)
    try:
        whole = _update(optimizer, group, nn.Parameter(start.clone()), start)
    except Exception:  # it cannot be rebuilt from its settings: nothing is known about it
        return
    name = type(optimizer).__name__
    try:
        # Cloned, because a replicated tensor would share its memory with the original.
        shards = nn.Parameter(distribute_tensor(start.clone(), mesh, placements))
        gradient = distribute_tensor(start.clone(), mesh, placements)
        updated = _update(optimizer, group, shards, gradient).full_tensor()
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
        raise ConfigurationError(_explain(name, f"fails on sharded weights ({reason})")) from error
    change = (whole - start).abs().max()
    if bool((updated - whole).abs().max() > _TOLERANCE * change):
        raise ConfigurationError(_explain(name, "updates a sharded weight unlike the whole one"))


def _update(
    optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter, gradient: torch.Tensor
) -> Any:
    """A few updates by another optimizer of the same class and settings."""
    cls: Any = type(optimizer)
    settings = {key: value for key, value in group.items() if key != "params"}
    if settings.get("lr") is not None:  # a warm-up may have set it to zero
        settings["lr"] = 0.1
    twin = cls([{**settings, "params": [parameter]}], **optimizer.defaults)
    for step in range(_STEPS):
        parameter.grad = (gradient * 7.0 + step).cos()
        twin.step()
    return parameter.detach()


def _explain(name: str, what: str) -> str:
    return (
        f"the optimizer {name} {what}, and ZeRO/FSDP, tensor and expert parallelism give each rank "
        "only a shard of every weight. Use AdamW or SGD, or leave those switches out."
    )


def uses_plain_gradients(
    clock: UpdateClock, optimizer: Optimizer | None, scaler: LossScaler | None
) -> bool:
    """Whether nothing but the optimizer's own step happens to a finished gradient."""
    assert optimizer is not None
    is_plain = clock.guard is None and clock.keeper is None and scaler is None
    is_watched = has_hooks(optimizer) or type(get_observer()) is not RunObserver
    return is_plain and not is_watched and "step" not in vars(optimizer)
