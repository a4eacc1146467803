"""``--mixed-precision``: run the model under autocast; its weights are already in fp32."""

from __future__ import annotations

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.precision.precision import apply_mixed_precision


def apply(assembly: Assembly) -> None:
    """Run every call of the model in the run's precision, which has its own start-up line."""
    if assembly.needs_autocast:
        apply_mixed_precision(assembly.model, assembly.precision, assembly.device)
