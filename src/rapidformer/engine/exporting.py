"""The weights of a composed model, whole, or as a folder that other libraries load.

Every rank must call these: sharded weights are gathered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rapidformer.accel.parallelize import Parallelized
from rapidformer.checkpoint.export import export_model, gather_weights
from rapidformer.checkpoint.writing import writing
from rapidformer.dist.heartbeat import in_phase
from rapidformer.dist.topology import Topology
from rapidformer.models.adapters import Adapter


class Composed(Protocol):
    """A model with its switches, asked for each time."""

    @property
    def parallelized(self) -> Parallelized:
        """The model with what was applied to it."""

    @property
    def adapter(self) -> Adapter | None:
        """What is trained instead of the model's own weights, if anything is."""


def gather_whole_weights(composed: Composed) -> dict[str, Any]:
    """All weights by name, whole, on rank 0; empty elsewhere."""
    weights = _gather_from_deepspeed(composed.parallelized)
    return gather_weights(composed.parallelized.model) if weights is None else weights


def export_composed(
    composed: Composed, folder: Path, topology: Topology, processor: Any, *, merge: bool | None
) -> Path:
    """Save the model alone; see ``engine.export``."""
    adapter, parallelized = composed.adapter, composed.parallelized
    if merge is None:
        merge = adapter is not None and adapter.base is None and not adapter.is_prompt
        if merge and not hasattr(parallelized.model, "config"):
            adapter, merge = None, False
    with in_phase("save"), writing(folder):
        return export_model(
            parallelized.model,
            folder,
            topology,
            processor=processor,
            weights=_gather_from_deepspeed(parallelized),
            adapter=adapter,
            merges=merge,
        )


def _gather_from_deepspeed(parallelized: Parallelized) -> dict[str, Any] | None:
    """All weights if DeepSpeed holds them; None otherwise. Weights are resharded before."""
    parallelized.settle()
    state = parallelized.deepspeed.state if parallelized.deepspeed is not None else None
    return None if state is None else state.gather_weights()
