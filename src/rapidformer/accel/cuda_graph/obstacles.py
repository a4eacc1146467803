"""Applies ``--cuda-graph``: decides whether this model's passes may be replayed at all.

The engine records them later (``accel/cuda_graph/graphs.py``), once it has seen them run.
"""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer.accel.assembly import Alone, Assembly
from rapidformer.accel.unpad.unpadding import prove_filling
from rapidformer.overlay import put_fact


@dataclass(frozen=True)
class MayCapture:
    """A fact on a model whose passes may be replayed."""

    is_asked: bool
    """Whether the user insists (``--cuda-graph on``)."""


def apply(assembly: Assembly) -> None:
    """Allow the engine to capture; what cannot be replayed is in the row."""
    if not isinstance(assembly.synchronizer, Alone):
        return
    prove_filling(assembly.model, assembly.plan, assembly.precision.dtype)
    put_fact(assembly.model, MayCapture(is_asked=assembly.args.cuda_graph == "on"))
