"""``--tensor-model-parallel-size``: split every layer over neighbouring ranks."""

from __future__ import annotations

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.tensor.parallel import apply_tensor_parallel


def apply(assembly: Assembly) -> str:
    """Split the layers by the model's plan, which sequence parallelism needs too."""
    mesh = assembly.topology.get_submesh("tensor")
    assert mesh is not None
    assembly.tensor_plan = apply_tensor_parallel(assembly.model, assembly.plan, mesh)
    return f"{mesh.size()} ranks (plan: {assembly.tensor_plan.source})"
