"""``--pipeline-model-parallel-size``: cut the model into stages; ``attach`` comes at the end."""

from __future__ import annotations

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.pipeline.pipeline import build_pipeline


def apply(assembly: Assembly) -> str:
    """Keep only this rank's stages; the plan then covers just those."""
    pipeline = build_pipeline(
        assembly.model,
        assembly.whole_plan,
        assembly.args,
        device=assembly.device,
        topology=assembly.topology,
        is_mixed=assembly.precision.dtype is not None,
    )
    assembly.pipeline, assembly.plan = pipeline, pipeline.local_plan
    assembly.applied.on_close(pipeline.close)
    return f"{assembly.topology.pipeline} ranks ({pipeline.layout.describe()})"
