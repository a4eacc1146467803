"""``--expert-model-parallel-size``: distribute the experts of every mixture over replicas."""

from __future__ import annotations

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.expert.parallel import apply_expert_parallel


def apply(assembly: Assembly) -> str:
    """Split the experts; their gradients are summed over different ranks than the rest."""
    mesh = assembly.topology.get_expert_mesh("expert")
    assert mesh is not None
    assembly.experts = apply_expert_parallel(
        assembly.model, assembly.plan, mesh, is_sharded=bool(assembly.args.zero_stage)
    )
    return f"{mesh.size()} ranks"
