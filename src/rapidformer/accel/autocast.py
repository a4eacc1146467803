"""``--mixed-precision``: the model runs under autocast, over weights that are in fp32 by now."""

from __future__ import annotations

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.precision import apply_mixed_precision


def apply(assembly: Assembly) -> None:
    """Run every call of the model in the precision of the run, which has a line of its own."""
    if assembly.needs_autocast:
        apply_mixed_precision(assembly.model, assembly.precision, assembly.device)
