"""The rows of a mask whose values are overwritten in place (``--cuda-graph``).

A replayed model cannot look at its mask. So the rows are read from the batch in host memory first,
and attached to the mask that the model gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from rapidformer.accel.unpad.rows import Rows

_FIXED = "rapidformer_fixed_rows"


@dataclass(frozen=True)
class Filling:
    """A fact on a model: whether its result stays the same if padding fills up its rows."""

    is_exact: bool


class FixedRows(NamedTuple):
    """What the model would find in its mask, the same on every replay."""

    rows: Rows | None
    """None: the batch runs as it is."""
    is_full: bool = False
    """Whether there is no padding."""


def fix_rows(mask: Tensor, fixed: FixedRows) -> None:
    """Attach what the model would find in its mask."""
    setattr(mask, _FIXED, fixed)


def get_fixed_rows(mask: Any) -> FixedRows | None:
    """What was attached to a mask, if anything was."""
    found: FixedRows | None = getattr(mask, _FIXED, None)
    return found
