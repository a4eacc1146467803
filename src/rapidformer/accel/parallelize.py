"""Turn a model into what is trained: all switches, in order.

Switches are applied in the order of their rows (``config/switches.py``), each by ``apply`` of its
module. Weights come in between, in two steps: before layers are split, weights are placed on the
device and made equal everywhere, since each rank cuts its slices from its own copy; if the model
was built without memory, the slices are created at the end, when it is known which ones are needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from rapidformer.accel.adapter_rules import check_adapter
from rapidformer.accel.applied import Applied
from rapidformer.accel.assembly import Assembly, GradientSynchronizer
from rapidformer.accel.batch_norm import synchronise_batch_norm
from rapidformer.accel.deepspeed.strategy import DeepSpeedStrategy, is_split_by_autotp
from rapidformer.accel.grouped_experts import apply_grouped_experts
from rapidformer.accel.lean_adapters import apply_lean_adapters
from rapidformer.accel.pipeline.pipeline import Pipeline
from rapidformer.accel.precision.precision import Precision, apply_fp32_weights
from rapidformer.accel.sharding.gathered_weights import GatheredWeights
from rapidformer.accel.sharding.zero import ShardedGradients, gather_weight
from rapidformer.accel.sliced_heads import apply_sliced_heads
from rapidformer.accel.small_tables import apply_small_tables
from rapidformer.accel.weights import check_weights, equalize_weights, make_weights, place_weights
from rapidformer.config import Settings
from rapidformer.config.switches import SWITCHES, Moment
from rapidformer.dist.topology import Topology
from rapidformer.models.deferred import get_deferred
from rapidformer.models.plan import GivenPlan, ModelPlan, find_plan


@dataclass(kw_only=True)
class Parallelized:
    """A model with its switches applied."""

    model: nn.Module
    plan: ModelPlan
    synchronizer: GradientSynchronizer
    switches: list[str] = field(default_factory=list)
    """What was turned on, and why: shown at start-up."""
    pipeline: Pipeline | None = None
    """The stages of a pipelined model."""
    applied: Applied = field(default_factory=Applied)
    """Every change that was made to the model, with its undo."""

    @property
    def deepspeed(self) -> DeepSpeedStrategy | None:
        """The strategy that performs the updates itself, if it does."""
        return self.synchronizer if isinstance(self.synchronizer, DeepSpeedStrategy) else None

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the loss as prepared by the engine."""
        if self.deepspeed is not None:
            self.deepspeed.backward(loss)
        else:
            loss.backward()

    @property
    def _gathered_weights(self) -> GatheredWeights | None:
        if isinstance(self.synchronizer, ShardedGradients):
            return self.synchronizer.gathered_weights
        return None

    def settle(self) -> None:
        """Reshard weights that a forward pass has left gathered."""
        if self._gathered_weights is not None:
            self._gathered_weights.release()

    def keep_gathered(self) -> AbstractContextManager[None]:
        """Gather sharded weights once for all forward passes inside (an evaluation)."""
        return (
            self._gathered_weights.keep() if self._gathered_weights is not None else nullcontext()
        )

    def gather_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """A whole parameter for use in a loss, with the gradient of one process."""
        return gather_weight(self.synchronizer, parameter)

    def watch_updates(self, optimizer: Optimizer) -> None:
        """Reshard gathered weights before every update of this optimizer."""
        if self._gathered_weights is not None:
            self._gathered_weights.watch_updates(optimizer)


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
) -> Parallelized:
    """Apply every switch that the settings turn on, in place."""
    check_adapter(model, args)
    plan = find_plan(model, given_plan)
    uses_deepspeed = args.deepspeed is not None and for_training
    assembly = Assembly(
        model=model,
        whole_plan=plan,
        plan=plan,
        args=args,
        device=device,
        topology=topology,
        precision=precision,
        deferred=get_deferred(model),
        uses_deepspeed=uses_deepspeed,
        uses_autotp=uses_deepspeed and topology.tensor > 1 and is_split_by_autotp(model),
    )
    check_weights(model, assembly.deferred)
    lines = [f"precision: {precision.reason}"]
    lines += _apply_switches(assembly, "whole")
    _place_weights(assembly)
    if for_training:
        steps = args.gradient_accumulation_steps or 1
        line = synchronise_batch_norm(model, topology, micro_batches=steps, is_filler=is_filler)
        lines += [line] if line else []
    if topology.tensor == 1 and (args.compile or precision.dtype is not None):
        apply_grouped_experts(model, device)
    lines += _apply_switches(assembly, "placed")
    _make_weights(assembly)
    lines += _apply_switches(assembly, "final")
    if for_training and device.type == "cuda":
        apply_small_tables(model)
        apply_sliced_heads(model)
    if assembly.pipeline is not None:
        # Its gates go outside everything applied so far.
        assembly.pipeline.attach(model)
    return Parallelized(
        model=model,
        plan=plan,
        synchronizer=assembly.synchronizer,
        switches=lines,
        pipeline=assembly.pipeline,
        applied=assembly.applied,
    )


def _apply_switches(assembly: Assembly, moment: Moment) -> Iterator[str]:
    """Apply the switches due at this moment; yields a start-up line for each that did something."""
    for switch in SWITCHES:
        is_due = switch.module and switch.moment == moment
        if not is_due or (assembly.uses_deepspeed and switch.done_by_deepspeed):
            continue
        if switch.is_on(assembly.args) and switch.has_what_it_needs(assembly.args):
            module = importlib.import_module(f"rapidformer.accel.{switch.module}")
            line = module.apply(assembly)
            if line:
                yield f"{switch.name}: {line}"


def _place_weights(assembly: Assembly) -> None:
    """Onto the device, in fp32 under mixed precision, and equal on every rank."""
    model, deferred = assembly.model, assembly.deferred
    stays_on_host = assembly.args.cpu_offload and not assembly.uses_deepspeed
    place_weights(model, assembly.device, offloads=stays_on_host or deferred is not None)
    # Before they are split, which copies them.
    apply_fp32_weights(model, assembly.precision)
    if not assembly.uses_deepspeed:
        apply_lean_adapters(model, assembly.precision)
    if assembly.pipeline is None and assembly.topology.mesh is not None:
        equalize_weights(model, deferred)


def _make_weights(assembly: Assembly) -> None:
    """Create this rank's slices of a model that was built without weights."""
    if assembly.deferred is None:
        return
    device = torch.device("cpu") if assembly.args.cpu_offload else assembly.device
    make_weights(assembly.model, assembly.plan, assembly.deferred, device)
