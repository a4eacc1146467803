"""Turn a model into what is trained: all rows, in order, each with its undo.

Weights come in between: before layers are split, they are placed on the device and made equal
everywhere, since each rank cuts its slices from its own copy; if the model was built without
memory, the slices are created at the end, when it is known which ones are needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rapidformer.accel.applied import Applied
from rapidformer.accel.assembly import Assembly, GradientSynchronizer
from rapidformer.accel.attention.kernel_scope import use_kernels
from rapidformer.accel.deepspeed.strategy import DeepSpeedStrategy
from rapidformer.accel.pickled_model import write_plainly
from rapidformer.accel.pipeline.pipeline import Pipeline
from rapidformer.accel.plain_weights import PlainWeights
from rapidformer.accel.precision.precision import Precision
from rapidformer.accel.sharding.gathered_weights import GatheredWeights
from rapidformer.accel.sharding.zero import ShardedGradients
from rapidformer.accel.shared_configs import separate_configs
from rapidformer.accel.weights import (
    broadcast_weights,
    check_gradients,
    check_weights,
    make_weights,
    place_weights,
)
from rapidformer.config import Settings
from rapidformer.config.explain import Answer, explain
from rapidformer.config.row import Moment
from rapidformer.config.switches import SWITCHES, Situation, Switch
from rapidformer.dist.collectives import is_alone
from rapidformer.dist.topology import Topology
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.models.adapters import find_adapter
from rapidformer.models.deferred import get_deferred
from rapidformer.models.plan import GivenPlan, ModelPlan, find_plan
from rapidformer.overlay import drop_fact, find_fact, put_fact


@dataclass(kw_only=True)
class Parallelized:
    """A model with its switches applied."""

    model: nn.Module
    plan: ModelPlan
    synchronizer: GradientSynchronizer
    applied: Applied
    """What was changed, with its undo."""
    situation: Situation = field(default_factory=Situation)
    precision: str = ""
    """Which one was chosen, and why."""
    pipeline: Pipeline | None = None
    """The stages of a pipelined model."""
    wants: Callable[[str], bool] = lambda name: False
    """Whether a row that the engine applies is on."""

    def explain(self, args: Settings) -> list[Answer]:
        """Every row: on, off or not applicable to this model, and why."""
        rows = {row.name: row.line for row in self.applied.rows if row.has_effect}
        found = {row.name: row.find_obstacle() for row in self.applied.rows}
        obstacles = {name: obstacle for name, obstacle in found.items() if obstacle is not None}
        return explain(args, self.situation, rows, obstacles)

    @property
    def switches(self) -> list[str]:
        """What was turned on, and why: shown at start-up."""
        return [f"precision: {self.precision}", *self.applied.describe()]

    @property
    def deepspeed(self) -> DeepSpeedStrategy | None:
        """The strategy that performs the updates itself, if it does."""
        return self.synchronizer if isinstance(self.synchronizer, DeepSpeedStrategy) else None

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Back-propagate the loss as prepared by the engine."""
        # What a model recomputes by itself must use the same attention again.
        with use_kernels(self.model):
            if self.deepspeed is not None:
                self.deepspeed.backward(loss, retain_graph=retain_graph)
            else:
                loss.backward(retain_graph=retain_graph)

    @property
    def _gathered(self) -> GatheredWeights | None:
        sharded = self.synchronizer
        return sharded.gathered_weights if isinstance(sharded, ShardedGradients) else None

    def settle(self) -> None:
        """Reshard weights that a forward pass has left gathered."""
        if self._gathered is not None:
            self._gathered.release()

    def keep_gathered(self) -> AbstractContextManager[None]:
        """Gather sharded weights once for all forward passes inside (an evaluation)."""
        return self._gathered.keep() if self._gathered is not None else nullcontext()

    def watch_updates(self, optimizer: Optimizer) -> None:
        """Reshard gathered weights before every update of this optimizer."""
        if self._gathered is not None:
            self.applied.keep_hook(self._gathered.watch_updates(optimizer))


@dataclass(eq=False)
class _Owner:
    """A fact on a model: what an engine has made of it. A copy of the model belongs to nobody."""

    parallelized: Parallelized | None

    def __deepcopy__(self, memo: Any) -> _Owner:
        return _Owner(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Owner, (None,)


def parallelize(
    model: nn.Module,
    args: Settings,
    *,
    device: torch.device,
    topology: Topology,
    precision: Precision,
    given_plan: GivenPlan | None = None,
    for_training: bool = True,
    is_filler: Callable[[], bool] = lambda: False,
    is_by_row: Callable[[], bool] = lambda: False,
) -> Parallelized:
    """Apply every row that is on, in place; what an earlier engine applied is undone first."""
    _take_from_earlier_engine(model)
    check_adapter(model, args)
    plan = find_plan(model, given_plan)
    plain = PlainWeights(model, topology)
    assembly = Assembly(
        model=model, whole_plan=plan, plan=plan, args=args, device=device, topology=topology,
        precision=precision, deferred=get_deferred(model),
        is_training=for_training, is_filler=is_filler, is_by_row=is_by_row,
        applied=Applied(model, plain),
    )  # fmt: skip
    check_weights(model, assembly.deferred)
    if for_training and topology.mesh is not None:
        check_gradients(model)
    try:
        write_plainly(model, assembly.applied)
        separate_configs(model, assembly.applied)
        _apply_all(assembly)
    except BaseException:
        # Or it would take all ranks, of which some may have gone on.
        if is_alone() or (topology.pipeline == 1 and plain.are_untouched()):
            assembly.applied.undo()
        raise
    pipeline = assembly.pipeline
    assert pipeline is None or isinstance(pipeline, Pipeline)
    parallelized = Parallelized(
        model=model, plan=plan, synchronizer=assembly.synchronizer, applied=assembly.applied,
        precision=precision.reason, pipeline=pipeline, wants=assembly.wants,
        situation=assembly.situation,
    )  # fmt: skip
    put_fact(model, _Owner(parallelized))
    assembly.applied.on_close(drop_fact, model, _Owner)
    return parallelized


def _take_from_earlier_engine(model: nn.Module) -> None:
    """Undo what an engine of this process has changed in a model; every rank must call this."""
    owner = find_fact(model, _Owner)
    earlier = owner.parallelized if owner is not None else None
    if earlier is not None and not earlier.applied.is_closed:
        if earlier.deepspeed is not None:
            raise RapidformerError(
                "DeepSpeed already holds this model and cannot start again: load the model again."
            )
        if not earlier.applied.undo():
            raise RapidformerError(
                "this model was composed by another engine, and its weights do not fit into memory "
                "whole, so that cannot be undone: load the model again."
            )
    drop_fact(model, _Owner)


def check_device(args: Settings, device: torch.device, precision: Precision) -> None:
    """Refuse what was asked for and needs another device or precision, before it is loaded."""
    situation = Situation(device=device.type, precision=precision.name)
    problems = []
    for switch in SWITCHES:
        if not switch.is_asked(args):
            continue
        obstacle = switch.find_own_obstacle(args, situation)
        problem = obstacle.reason if obstacle and obstacle.if_asked == "refused" else None
        if switch.module and obstacle is None:
            # A capability of the device that only the module knows.
            find_problem = getattr(_import(switch), "find_device_problem", None)
            problem = find_problem(device) if find_problem is not None else None
        if problem is not None:
            problems.append(switch.refuse(args, problem))
    if problems:
        raise ConfigurationError(problems)


def check_adapter(model: nn.Module, args: Settings) -> None:
    """Refuse switches that the model's adapter cannot be combined with."""
    adapter = find_adapter(model)
    if adapter is None:
        return
    kind = adapter.config.peft_type.value
    problems = [
        f"{switch.describe(args)} cannot be combined with {kind}: {reason}."
        for switch in SWITCHES
        for excluded, reason in switch.excludes_adapters.items()
        if switch.is_on(args) and excluded in (kind, "prompt" if adapter.is_prompt else kind)
    ]
    if adapter.is_prompt and args.packing:
        problems.append(
            f"--packing cannot be combined with {kind}: peft ignores the positions of packed "
            "examples. Leave it out, or use LoRA (--lora-rank)."
        )
    if problems:
        raise ConfigurationError(problems)


def _apply_all(assembly: Assembly) -> None:
    """All rows; between them, weights are placed, made equal and, if there are none, created."""
    model, deferred = assembly.model, assembly.deferred
    _apply_rows(assembly, "whole")
    stays_on_host = assembly.wants("CPU offload")
    place_weights(model, assembly.device, offloads=stays_on_host or deferred is not None)
    _apply_rows(assembly, "weights")
    if assembly.pipeline is None and assembly.topology.mesh is not None and deferred is None:
        broadcast_weights(model)  # deferred ones are equal by construction
    _apply_rows(assembly, "placed")
    if deferred is not None and not deferred.is_hollow:
        device = torch.device("cpu") if stays_on_host else assembly.device
        make_weights(model, assembly.plan, deferred, device)
    _apply_rows(assembly, "final")


def _apply_rows(assembly: Assembly, moment: Moment) -> None:
    """Apply the rows due at this moment."""
    with assembly.applied.in_turn():
        for switch in SWITCHES:
            if switch.module and switch.moment == moment and _is_due(switch, assembly):
                apply = getattr(_import(switch), switch.module.partition(":")[2] or "apply")
                with assembly.applied.row(switch.name, is_silent=switch.kind == "always") as row:
                    row.line = apply(assembly) or ""


def _is_due(switch: Switch, assembly: Assembly) -> bool:
    """Whether a row is on; one that was asked for and cannot be applied is refused."""
    args = assembly.args
    if not switch.is_on(args):
        return False
    obstacle = switch.find_obstacle(args, assembly.situation)
    if obstacle is not None and obstacle.if_asked == "refused" and switch.is_asked(args):
        raise ConfigurationError(switch.refuse(args, obstacle.reason))
    return obstacle is None


def _import(switch: Switch) -> ModuleType:
    return importlib.import_module(f"rapidformer.accel.{switch.module.partition(':')[0]}")
