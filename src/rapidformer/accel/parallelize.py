"""The order in which switches are applied to a model. Read from top to bottom, it is the manual.

Tensor parallelism comes first: what follows sees layers as they are split. Recompute comes before
compile, so that a compiled block is recomputed as compiled; both before sharding, which must see
the final blocks; the precision last, around everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rapidformer.accel.compile import apply_compile
from rapidformer.accel.data_parallel import apply_data_parallel
from rapidformer.accel.precision import Precision, apply_fp32_weights, apply_mixed_precision
from rapidformer.accel.recompute import apply_recompute
from rapidformer.accel.sequence_parallel import apply_sequence_parallel
from rapidformer.accel.sharding import ShardedGradients, apply_sharding
from rapidformer.accel.tensor_parallel import apply_tensor_parallel
from rapidformer.accel.vocabulary_loss import apply_vocabulary_loss
from rapidformer.accel.weights import make_weights, place_weights, share_weights
from rapidformer.config import TrainingArguments
from rapidformer.dist.topology import Topology, build_lone_mesh
from rapidformer.log import warn_once
from rapidformer.models.deferred import get_deferred
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
    deferred = get_deferred(model)
    place_weights(model, device, offloads=args.cpu_offload or deferred is not None)
    apply_fp32_weights(model, precision)
    switches = [f"precision: {precision.reason}"]
    if topology.mesh is not None:
        share_weights(model, deferred)
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
    synchronizer: GradientSynchronizer = _Alone()
    mesh = _find_sharding_mesh(args, topology, device)
    if mesh is not None and args.zero_stage:
        synchronizer = apply_sharding(model, plan, mesh, args.zero_stage, offloads=args.cpu_offload)
        switches.append(_describe_sharding(args, mesh))
    if deferred is not None:
        make_weights(model, plan, deferred, torch.device("cpu") if args.cpu_offload else device)
    if mesh is not None and not args.zero_stage:
        synchronizer = apply_data_parallel(model, mesh.get_group())
        switches.append(f"data parallel over {mesh.size()} processes")
    apply_mixed_precision(model, precision, device)
    return Parallelized(model=model, plan=plan, synchronizer=synchronizer, switches=switches)


def _find_sharding_mesh(
    args: TrainingArguments, topology: Topology, device: torch.device
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
    elif args.zero_stage:
        warn_once(f"ZeRO-{args.zero_stage} has no effect in one process: nothing to split.")
    return None


def _describe_sharding(args: TrainingArguments, mesh: DeviceMesh) -> str:
    count = mesh.size(mesh.ndim - 1)
    text = f"ZeRO-{args.zero_stage} over {count} process{'es' * (count > 1)}"
    if mesh.ndim > 1:
        text += f", {mesh.size(0)} copies"
    return text + (", kept in the host's memory" if args.cpu_offload else "")


def _describe_compile(args: TrainingArguments, plan: ModelPlan) -> str:
    what = f"{len(plan.blocks)} blocks" if plan.blocks else "the whole model"
    why = (
        " (--onnx-runtime-training: ONNX Runtime's training package has ended)"
        if args.onnx_runtime_training
        else ""
    )
    return f"torch.compile of {what} with {args.compile_backend}{why}"
