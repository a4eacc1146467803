"""``--context-parallel-size``: split every sequence over neighbouring ranks."""

from __future__ import annotations

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.context.parallel import apply_context_parallel


def apply(assembly: Assembly) -> str:
    """Split the tokens between the first block and the last."""
    mesh = assembly.topology.get_submesh("context")
    assert mesh is not None
    apply_context_parallel(assembly.model, assembly.plan, mesh, assembly.applied)
    return f"{mesh.size()} ranks"
