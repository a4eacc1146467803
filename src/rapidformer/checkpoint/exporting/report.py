"""What an export says of itself: in ``export.json``, in its model card, and to the caller."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer.checkpoint.exporting.proof import Changes, Proof
from rapidformer.checkpoint.exporting.serving import Serving


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was exported, and what is proven about it."""

    source: str
    folder: str
    format: str
    dtype: str
    is_merged: bool
    changes: Changes | None
    """None if the starting model is unknown."""
    proof: Proof | None
    """None if it was not wanted."""
    serving: Serving | None
    """What vLLM and ``transformers serve`` find in it; None if it is not for them."""
