"""The order in which switches are applied to a model. Read from top to bottom, it is the manual.

Tensor parallelism comes first: what follows sees layers as they are split. Recompute comes before
compile, so that a compiled block is recomputed as compiled; both before context parallelism, which
cuts and joins tokens outside of them. Experts are shared out before sharding, which must see the
final blocks and splits what each process has of them; the precision last, around everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from rapidformer.accel.compile import apply_compile
from rapidformer.accel.context_parallel import apply_context_parallel
from rapidformer.accel.data_parallel import apply_data_parallel, broadcast_weights
from rapidformer.accel.expert_parallel import (
    ExpertGradients,
    apply_expert_parallel,
    shard_experts,
)
from rapidformer.accel.precision import Precision, apply_fp32_weights, apply_mixed_precision
from rapidformer.accel.recompute import apply_recompute
from rapidformer.accel.sequence_parallel import apply_sequence_parallel
from rapidformer.accel.sharding import ShardedGradients, apply_sharding
from rapidformer.accel.tensor_parallel import apply_tensor_parallel
from rapidformer.accel.vocabulary_loss import apply_vocabulary_loss
from rapidformer.config import TrainingArguments
from rapidformer.dist.topology import Topology
from rapidformer.log import warn_once
from rapidformer.models.plan import ModelPlan, find_plan


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

    def settle(self) -> None:
        """Bring the model into the state between two updates (after an evaluation, say)."""
        if isinstance(self.synchronizer, ShardedGradients):
            self.synchronizer.reshard()


def parallelize(
    model: nn.Module,
    args: TrainingArguments,
    *,
    device: torch.device,
    topology: Topology,
    precision: Precision,
) -> Parallelized:
    """Apply every switch that the settings ask for, in place."""
    plan = find_plan(model)
    model.to(device)
    apply_fp32_weights(model, precision)
    switches = [f"precision: {precision.reason}"]
    if topology.mesh is not None:
        broadcast_weights(model)
    tensor_mesh = topology.get_submesh("tensor")
    if tensor_mesh is not None:
        tensor_plan = apply_tensor_parallel(model, plan, tensor_mesh)
        switches.append(
            f"tensor parallel over {tensor_mesh.size()} processes (by {tensor_plan.source})"
        )
        if args.sequence_parallel:
            apply_sequence_parallel(model, plan, tensor_plan, tensor_mesh)
            switches.append("sequence parallel between the layers of each block")
        if apply_vocabulary_loss(model, plan, tensor_mesh):
            switches.append("loss over the split vocabulary")
    if args.checkpoint_activations:
        granularity = args.recompute_granularity or "full"
        apply_recompute(model, plan, granularity=granularity, interval=args.recompute_interval)
        every = f", every {args.recompute_interval}. block" if args.recompute_interval > 1 else ""
        switches.append(f"recompute: {granularity}{every} of {len(plan.blocks)} blocks")
    if args.compile:
        apply_compile(model, plan, backend=args.compile_backend)
        switches.append(_describe_compile(args, plan))
    context_mesh = topology.get_submesh("context")
    if context_mesh is not None:
        apply_context_parallel(model, plan, context_mesh)
        switches.append(f"context parallel: sequences over {context_mesh.size()} processes")
    experts: list[nn.Module] = []
    expert_mesh, same_experts = (topology.get_expert_mesh(a) for a in ("expert", "expert_data"))
    if expert_mesh is not None:
        is_sharded = bool(args.zero_stage)
        experts = apply_expert_parallel(model, plan, expert_mesh, is_sharded=is_sharded)
        switches.append(f"expert parallel: mixtures over {expert_mesh.size()} processes")
    synchronizer: GradientSynchronizer = _Alone()
    mesh = topology.get_replica_mesh()
    if mesh is None:
        if args.zero_stage:
            warn_once(f"ZeRO-{args.zero_stage} has no effect in one process: nothing to split.")
    elif args.zero_stage:
        if same_experts is not None:
            shard_experts(experts, same_experts, args.zero_stage)
        synchronizer = apply_sharding(model, plan, mesh, args.zero_stage)
        switches.append(f"ZeRO-{args.zero_stage} over {mesh.size()} processes")
    elif same_experts is not None:
        synchronizer = ExpertGradients(model, experts, mesh, same_experts)
        switches.append(
            f"gradients summed over {mesh.size()} processes, of experts over {same_experts.size()}"
        )
    else:
        synchronizer = apply_data_parallel(model, mesh.get_group())
        what = "data parallel" if topology.context == 1 else "gradients summed"
        switches.append(f"{what} over {mesh.size()} processes")
    apply_mixed_precision(model, precision, device)
    return Parallelized(model=model, plan=plan, synchronizer=synchronizer, switches=switches)


def _describe_compile(args: TrainingArguments, plan: ModelPlan) -> str:
    what = f"{len(plan.blocks)} blocks" if plan.blocks else "the whole model"
    why = (
        " (--onnx-runtime-training: ONNX Runtime's training package has ended)"
        if args.onnx_runtime_training
        else ""
    )
    return f"torch.compile of {what} with {args.compile_backend}{why}"
