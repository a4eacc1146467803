"""Rows attached to a mask that a CUDA graph overwrites in place.

A replayed model cannot read its mask. So the rows are read from the batch in host memory first, and
attached to the mask that the model gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from rapidformer.accel.unpad.rows import Rows

_FIXED = "rapidformer_fixed_rows"


@dataclass(frozen=True)
class Filling:
    """A fact on a model: whether padding added to a batch leaves its results unchanged."""

    is_exact: bool


class FixedRows(NamedTuple):
    """What the model would read off its mask, the same for every replay."""

    rows: Rows | None
    """None if the batch runs padded."""
    is_full: bool = False
    """Whether there is no padding."""


def fix_rows(mask: Tensor, fixed: FixedRows) -> None:
    """Attach what the model would read off its mask."""
    setattr(mask, _FIXED, fixed)


def get_fixed_rows(mask: Any) -> FixedRows | None:
    """What was attached to a mask, or None."""
    found: FixedRows | None = getattr(mask, _FIXED, None)
    return found
