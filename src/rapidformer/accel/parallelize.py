"""The order in which switches are applied to a model. Read from top to bottom, it is the manual.

A pipeline is cut first of all, so that no process works on blocks it will not have. Then tensor
parallelism: what follows sees layers as they are split. Recompute comes before compile, so that a
compiled block is recomputed as compiled; both before sharding, which must see the final blocks; the
precision then goes around everything, and the pipeline's gates stand outside of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from rapidformer.accel.compile import apply_compile
from rapidformer.accel.data_parallel import apply_data_parallel, broadcast_weights
from rapidformer.accel.pipeline.pipeline import Pipeline, build_pipeline
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
    pipeline: Pipeline | None = None
    """The stages of a model that is cut into some."""

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
    plan = whole_plan = find_plan(model)
    pipeline = None
    if topology.pipeline > 1:
        is_mixed = precision.dtype is not None
        pipeline = build_pipeline(
            model, plan, args, device=device, topology=topology, is_mixed=is_mixed
        )
        plan = pipeline.local_plan
    model.to(device)
    apply_fp32_weights(model, precision)
    switches = [f"precision: {precision.reason}"]
    if pipeline is not None:
        switches.append(f"pipeline of {topology.pipeline} ({pipeline.layout.describe()})")
    elif topology.mesh is not None:
        broadcast_weights(model)
    tensor_mesh = topology.get_submesh("tensor")
    if tensor_mesh is not None:
        tensor_plan = apply_tensor_parallel(model, plan, tensor_mesh)
        switches.append(
            f"tensor parallel over {tensor_mesh.size()} processes (by {tensor_plan.source})"
        )
        if args.sequence_parallel:
            stacks = pipeline.stacks if pipeline else ()
            apply_sequence_parallel(model, plan, tensor_plan, tensor_mesh, stacks)
            switches.append("sequence parallel between the layers of each block")
        if apply_vocabulary_loss(model, plan, tensor_mesh):
            switches.append("loss over the split vocabulary")
    if args.checkpoint_activations:
        granularity = args.recompute_granularity or "full"
        apply_recompute(model, plan, granularity=granularity, interval=args.recompute_interval)
        every = f", every {args.recompute_interval}. block" if args.recompute_interval > 1 else ""
        switches.append(f"recompute: {granularity}{every} of {len(whole_plan.blocks)} blocks")
    if args.compile:
        apply_compile(model, plan, backend=args.compile_backend)
        switches.append(_describe_compile(args, plan))
    synchronizer: GradientSynchronizer = _Alone()
    mesh = topology.get_replica_mesh()
    if mesh is None:
        if args.zero_stage and topology.is_first_process:
            where = "in one process" if topology.mesh is None else "without data parallelism"
            warn_once(f"ZeRO-{args.zero_stage} has no effect {where}: nothing to split.")
    elif args.zero_stage:
        # Zero-bubble assigns gradients where fully_shard's hooks cannot see it: reduced at the end.
        is_deferred = args.pipeline_schedule == "zero-bubble" and pipeline is not None
        synchronizer = apply_sharding(model, plan, mesh, 1 if is_deferred else args.zero_stage)
        how = ", but weights and gradients are whole during an update" if is_deferred else ""
        switches.append(f"ZeRO-{args.zero_stage} over {mesh.size()} processes{how}")
    else:
        synchronizer = apply_data_parallel(model, mesh.get_group())
        switches.append(f"data parallel over {mesh.size()} processes")
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


def _describe_compile(args: TrainingArguments, plan: ModelPlan) -> str:
    what = f"{len(plan.blocks)} blocks" if plan.blocks else "the whole model"
    why = (
        " (--onnx-runtime-training: ONNX Runtime's training package has ended)"
        if args.onnx_runtime_training
        else ""
    )
    return f"torch.compile of {what} with {args.compile_backend}{why}"
