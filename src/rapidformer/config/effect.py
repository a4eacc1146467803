"""What a row does to the memory and work of a run; ``planning/`` adds them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kept = Literal["everything", "inputs", "products", "compiled"]
"""What a block keeps for its backward pass: all that autograd saves, its inputs alone, the results
of matrix products and attention, or what a compiled block saves."""

MOST_COPIED = 2**31
"""Bytes of weights, or of their gradients, that CUDA graphs may hold once more: above, copies take
much memory, and launches little of the time."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Of one switch."""

    keeps: Mapping[Any, Kept] = field(default_factory=dict)
    """What a block keeps, by the value of a setting that turns the switch on."""
    on_host: tuple[str, ...] = ()
    """Parts of the memory that move to the host."""
    shards_from: Mapping[str, int] = field(default_factory=dict)
    """Parts of the state that are sharded over the data-parallel ranks, from which stage on."""
    divides: Literal["", "layers", "stream", "tokens", "blocks", "experts"] = ""
    """What its size divides; the stream is what is between split layers."""
    moments: float | None = None
    """Bytes of optimizer state for each trained weight."""
    copies_gradients: Literal["", "always", "at the end"] = ""
    """When a second copy of all gradients is held."""
    takes: int = 0
    """Bytes that it takes whatever the model."""
    most_work: float | None = None
    """Operations of a micro-batch above which it is not worth its cost."""
    in_8_bits: bool = False
    """Whether the blocks' matrix products are in 8 bits."""
