"""``--deepspeed``: DeepSpeed handles gradients and updates, once there is an optimizer."""

from __future__ import annotations

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.deepspeed.strategy import DeepSpeedStrategy


def apply(assembly: Assembly) -> str | None:
    """Prepare to hand the model over; evaluation alone does not need DeepSpeed."""
    if not assembly.uses_deepspeed:
        return None
    strategy = DeepSpeedStrategy(
        assembly.model,
        assembly.whole_plan,
        assembly.args,
        device=assembly.device,
        topology=assembly.topology,
        precision=assembly.precision,
        uses_autotp=assembly.uses_autotp,
    )
    assembly.synchronizer = strategy
    assembly.needs_autocast = not strategy.keeps_precision
    return strategy.describe()
