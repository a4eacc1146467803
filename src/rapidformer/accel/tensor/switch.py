"""``--tensor-model-parallel-size``: split every layer over neighbouring ranks."""

from __future__ import annotations

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.tensor.parallel import apply_tensor_parallel
from rapidformer.accel.tensor.slices import make_local


def apply(assembly: Assembly) -> str | None:
    """Split the layers by the model's plan, which sequence parallelism needs too."""
    if assembly.uses_autotp:
        return None
    mesh = assembly.topology.get_submesh("tensor")
    assert mesh is not None
    assembly.tensor_plan = apply_tensor_parallel(assembly.model, assembly.plan, mesh)
    if assembly.uses_deepspeed:
        make_local(assembly.model, mesh)
    return f"{mesh.size()} ranks (plan: {assembly.tensor_plan.source})"
