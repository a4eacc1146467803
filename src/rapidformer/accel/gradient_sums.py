"""Data parallelism without ZeRO: gradients are summed while the backward pass still runs."""

from __future__ import annotations

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.data_parallel import apply_data_parallel
from rapidformer.accel.expert.parallel import ExpertGradients


def apply(assembly: Assembly) -> str | None:
    """Sum gradients over the ranks with different tokens, unless ZeRO does."""
    mesh = assembly.topology.get_sharding_mesh()
    if mesh is None or assembly.args.zero_stage:
        return None
    same_experts = assembly.topology.get_expert_mesh("expert_data")
    assembly.synchronizer = (
        apply_data_parallel(assembly.model, mesh.get_group())
        if same_experts is None
        else ExpertGradients(assembly.model, assembly.experts, mesh, same_experts)
    )
    return f"gradients summed over {mesh.size()} ranks"
