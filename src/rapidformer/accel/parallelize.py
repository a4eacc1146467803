"""The order in which switches are applied to a model. Read from top to bottom, it is the manual.

A pipeline is cut first of all, so that no process works on blocks it will not have. Then tensor
parallelism: what follows sees layers as they are split. Recompute comes before compile, so that a
compiled block is recomputed as compiled; both before context parallelism, which cuts and joins
tokens outside of them. Experts are shared out before sharding, which must see the final blocks and
splits what each process has of them; the precision then goes around everything, and the pipeline's
gates stand outside of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from rapidformer.accel.compile import apply_compile
from rapidformer.accel.context.parallel import apply_context_parallel
from rapidformer.accel.data_parallel import apply_data_parallel, broadcast_weights
from rapidformer.accel.deepspeed.strategy import DeepSpeedStrategy
from rapidformer.accel.expert.parallel import (
    ExpertGradients,
    apply_expert_parallel,
    shard_experts,
)
from rapidformer.accel.pipeline.pipeline import Pipeline, build_pipeline
from rapidformer.accel.precision import Precision, apply_fp32_weights, apply_mixed_precision
from rapidformer.accel.recompute import apply_recompute
from rapidformer.accel.sharding.gathered_weights import GatheredWeights
from rapidformer.accel.sharding.zero import ShardedGradients, apply_sharding
from rapidformer.accel.tensor.parallel import apply_tensor_parallel
from rapidformer.accel.tensor.sequence import apply_sequence_parallel
from rapidformer.accel.tensor.vocabulary_loss import apply_vocabulary_loss
from rapidformer.accel.weights import check_weights, make_weights, place_weights, share_weights
from rapidformer.config import Settings
from rapidformer.dist.topology import Topology, build_lone_mesh
from rapidformer.log import warn_once
from rapidformer.models.deferred import get_deferred
from rapidformer.models.plan import GivenPlan, ModelPlan, find_plan


class GradientSynchronizer(Protocol):
    """What every data-parallel strategy does around a backward pass: leave *sums* in ``.grad``."""

    def before_backward(self, is_last: bool) -> None: ...

    def after_backward(self) -> None: ...


class _Alone:
    """One process: nothing to synchronize."""

    def before_backward(self, is_last: bool) -> None: ...

    def after_backward(self) -> None: ...


@dataclass(kw_only=True)
class Parallelized:
    """A model with its switches on."""

    model: nn.Module
    plan: ModelPlan
    synchronizer: GradientSynchronizer
    switches: list[str] = field(default_factory=list)
    """What was switched on, and why: shown at start-up."""
    pipeline: Pipeline | None = None
    """The stages of a model that is cut into some."""

    @property
    def deepspeed(self) -> DeepSpeedStrategy | None:
        """The strategy that makes the updates itself, if it is the one."""
        return self.synchronizer if isinstance(self.synchronizer, DeepSpeedStrategy) else None

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate what the engine has made of a loss."""
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
) -> Parallelized:
    """Apply every switch that the settings ask for, in place."""
    plan = whole_plan = find_plan(model, given_plan)
    if args.deepspeed is not None and for_training:
        return _hand_to_deepspeed(model, plan, args, device, topology, precision)
    deferred = get_deferred(model)
    check_weights(model, deferred)
    pipeline = None
    if topology.pipeline > 1:
        is_mixed = precision.dtype is not None
        pipeline = build_pipeline(
            model, plan, args, device=device, topology=topology, is_mixed=is_mixed
        )
        plan = pipeline.local_plan
    place_weights(model, device, offloads=args.cpu_offload or deferred is not None)
    apply_fp32_weights(model, precision)
    switches = [f"precision: {precision.reason}"]
    if pipeline is not None:
        switches.append(f"pipeline of {topology.pipeline} ({pipeline.layout.describe()})")
    elif topology.mesh is not None:
        share_weights(model, deferred)
    tensor_mesh = topology.get_submesh("tensor")
    if tensor_mesh is not None:
        stacks = pipeline.stacks if pipeline else ()
        switches += _share_layers(model, plan, args, tensor_mesh, stacks)
    if args.checkpoint_activations:
        switches.append(_recompute(model, plan, args, len(whole_plan.blocks)))
    if args.compile:
        apply_compile(model, plan, backend=args.compile_backend)
        switches.append(_describe_compile(args, plan))
    context_mesh = topology.get_submesh("context")
    if context_mesh is not None:
        apply_context_parallel(model, plan, context_mesh)
        switches.append(f"context parallel: sequences over {context_mesh.size()} processes")
    experts: list[nn.Module] = []
    expert_mesh = topology.get_expert_mesh("expert")
    if expert_mesh is not None:
        is_sharded = bool(args.zero_stage)
        experts = apply_expert_parallel(model, plan, expert_mesh, is_sharded=is_sharded)
        switches.append(f"expert parallel: mixtures over {expert_mesh.size()} processes")
    mesh = _find_sharding_mesh(args, topology, device)
    same_experts = topology.get_expert_mesh("expert_data")
    synchronizer: GradientSynchronizer = _Alone()
    if mesh is not None and args.zero_stage:
        synchronizer = _split_state(model, plan, args, mesh, experts, same_experts)
        switches.append(_describe_sharding(args, mesh))
    if deferred is not None:
        make_weights(model, plan, deferred, torch.device("cpu") if args.cpu_offload else device)
    if mesh is not None and not args.zero_stage:
        # Only now: hooks stand on parameters that stay.
        synchronizer = _sum_gradients(model, mesh, experts, same_experts)
        what = "data parallel" if topology.context == 1 else "gradients summed"
        switches.append(f"{what} over {mesh.size()} processes")
    apply_mixed_precision(model, precision, device)
    if pipeline is not None:
        pipeline.attach(model)
    return Parallelized(
        model=model,
        plan=whole_plan,
        synchronizer=synchronizer,
        switches=switches,
        pipeline=pipeline,
    )


def _share_layers(
    model: nn.Module,
    plan: ModelPlan,
    args: Settings,
    mesh: DeviceMesh,
    stacks: Sequence[tuple[str, ...]],
) -> list[str]:
    """Tensor parallelism and what only it makes possible; returns what was switched on."""
    tensor_plan = apply_tensor_parallel(model, plan, mesh)
    switches = [f"tensor parallel over {mesh.size()} processes (by {tensor_plan.source})"]
    if args.sequence_parallel:
        apply_sequence_parallel(model, plan, tensor_plan, mesh, stacks)
        switches.append("sequence parallel between the layers of each block")
    if apply_vocabulary_loss(model, plan, mesh):
        switches.append("loss over the split vocabulary")
    return switches


def _split_state(
    model: nn.Module,
    plan: ModelPlan,
    args: Settings,
    mesh: DeviceMesh,
    experts: list[nn.Module],
    same_experts: DeviceMesh | None,
) -> GradientSynchronizer:
    if same_experts is not None:
        shard_experts(experts, same_experts, args.zero_stage, offloads=args.cpu_offload)
    stage = 1 if _is_reduced_late(args) else args.zero_stage
    return apply_sharding(model, plan, mesh, stage, offloads=args.cpu_offload)


def _is_reduced_late(args: Settings) -> bool:
    """Zero-bubble assigns gradients where fully_shard's hooks cannot see it: reduced at the end."""
    return args.pipeline_model_parallel_size > 1 and args.pipeline_schedule == "zero-bubble"


def _sum_gradients(
    model: nn.Module,
    mesh: DeviceMesh,
    experts: list[nn.Module],
    same_experts: DeviceMesh | None,
) -> GradientSynchronizer:
    if same_experts is not None:
        return ExpertGradients(model, experts, mesh, same_experts)
    return apply_data_parallel(model, mesh.get_group())


def _find_sharding_mesh(
    args: Settings, topology: Topology, device: torch.device
) -> DeviceMesh | None:
    """The processes that see other tokens; one alone, where its weights live elsewhere."""
    mesh = topology.get_sharding_mesh()
    if mesh is not None:
        return mesh
    if args.cpu_offload and topology.mesh is not None:
        return topology.mesh["data"]
    if args.cpu_offload and device.type != "cpu":
        return build_lone_mesh(device.type)
    if args.cpu_offload:
        warn_once("--cpu-offload has no effect on one CPU process: everything is there already.")
    elif args.zero_stage and topology.is_first_process:
        where = "in one process" if topology.mesh is None else "without data parallelism"
        warn_once(f"ZeRO-{args.zero_stage} has no effect {where}: nothing to split.")
    return None


def _describe_sharding(args: Settings, mesh: DeviceMesh) -> str:
    count = mesh.size(mesh.ndim - 1)
    text = f"ZeRO-{args.zero_stage} over {count} process{'es' * (count > 1)}"
    if mesh.ndim > 1:
        text += f", {mesh.size(0)} copies"
    if _is_reduced_late(args):
        text += ", but weights and gradients are whole during an update"
    return text + (", kept in the host's memory" if args.cpu_offload else "")


def _hand_to_deepspeed(
    model: nn.Module,
    plan: ModelPlan,
    args: Settings,
    device: torch.device,
    topology: Topology,
    precision: Precision,
) -> Parallelized:
    """What DeepSpeed does not do itself; it takes the model over once there is an optimizer."""
    strategy = DeepSpeedStrategy(
        model, plan, args, device=device, topology=topology, precision=precision
    )
    model.to(device)
    apply_fp32_weights(model, precision)
    switches = [f"precision: {precision.reason}", strategy.describe()]
    if topology.mesh is not None:
        broadcast_weights(model)
    if args.checkpoint_activations:
        switches.append(_recompute(model, plan, args, len(plan.blocks)))
    if args.compile:
        apply_compile(model, plan, backend=args.compile_backend)
        switches.append(_describe_compile(args, plan))
    if not strategy.keeps_precision:
        apply_mixed_precision(model, precision, device)
    return Parallelized(model=model, plan=plan, synchronizer=strategy, switches=switches)


def _recompute(model: nn.Module, plan: ModelPlan, args: Settings, total: int) -> str:
    granularity = args.recompute_granularity or "full"
    apply_recompute(model, plan, granularity=granularity, interval=args.recompute_interval)
    every = f", every {args.recompute_interval}. block" if args.recompute_interval > 1 else ""
    return f"recompute: {granularity}{every} of {total} blocks"


def _describe_compile(args: Settings, plan: ModelPlan) -> str:
    what = f"{len(plan.blocks)} blocks" if plan.blocks else "the whole model"
    why = (
        " (--onnx-runtime-training: ONNX Runtime's training package has ended)"
        if args.onnx_runtime_training
        else ""
    )
    return f"torch.compile of {what} with {args.compile_backend}{why}"
