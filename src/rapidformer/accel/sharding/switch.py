"""ZeRO, with replicas of the shards (``--hybrid-sharding-size``) and host memory
(``--cpu-offload``).
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.expert.parallel import shard_experts
from rapidformer.accel.sharding.steady_depth import require_steady_depth
from rapidformer.accel.sharding.zero import apply_sharding
from rapidformer.config import Settings
from rapidformer.dist.topology import build_lone_mesh
from rapidformer.log import warn_once


def apply(assembly: Assembly) -> str | None:
    """Shard the training state over the ranks with different tokens."""
    model, args = assembly.model, assembly.args
    mesh = _find_mesh(assembly)
    if mesh is None:
        return None
    same_experts = assembly.topology.get_expert_mesh("expert_data")
    if same_experts is not None:
        shard_experts(assembly.experts, same_experts, args.zero_stage, offloads=args.cpu_offload)
    stage = 1 if _is_reduced_late(args) else args.zero_stage
    assembly.synchronizer = apply_sharding(
        model, assembly.plan, mesh, stage, offloads=args.cpu_offload
    )
    if assembly.pipeline is None:  # a rank with several stages runs them in the schedule's order
        require_steady_depth(assembly.model, tuple(assembly.plan.blocks))
    return _describe(args, mesh)


def _find_mesh(assembly: Assembly) -> DeviceMesh | None:
    """The ranks with different tokens; a single rank if its weights are offloaded."""
    args, topology, device = assembly.args, assembly.topology, assembly.device
    mesh = topology.get_sharding_mesh()
    if mesh is not None:
        return mesh
    if args.cpu_offload and topology.mesh is not None:
        return topology.mesh["data"]
    if args.cpu_offload and device.type != "cpu":
        return build_lone_mesh(device.type)
    if args.cpu_offload:
        warn_once(
            "--cpu-offload has no effect on a single CPU rank: everything is in host memory anyway."
        )
    elif topology.is_first_process:
        where = "on a single rank" if topology.mesh is None else "without data parallelism"
        warn_once(f"ZeRO-{args.zero_stage} has no effect {where}: there is nothing to shard.")
    return None


def _is_reduced_late(args: Settings) -> bool:
    """Zero-bubble assigns gradients unseen by fully_shard's hooks: they are reduced at the end."""
    return args.pipeline_model_parallel_size > 1 and args.pipeline_schedule == "zero-bubble"


def _describe(args: Settings, mesh: DeviceMesh) -> str:
    count = mesh.size(mesh.ndim - 1)
    text = f"stage {args.zero_stage} over {count} rank{'s' * (count > 1)}"
    if mesh.ndim > 1:
        text += f", {mesh.size(0)} replicas"
    if _is_reduced_late(args):
        text += ", but weights and gradients are whole during an optimizer step"
    return text + (", kept in host memory" if args.cpu_offload else "")
