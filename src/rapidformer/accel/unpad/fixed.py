"""What was found out about a mask whose values are replaced in place (``--cuda-graph``).

A model that is replayed cannot look at its mask. So the rows are read from the batch in host memory
beforehand, and the mask that reaches the model carries them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from rapidformer.accel.unpad.rows import Rows

_FIXED = "rapidformer_fixed_rows"


@dataclass(frozen=True)
class Filling:
    """A fact on a model: whether it gives the same result if padding fills its rows up."""

    is_exact: bool


class FixedRows(NamedTuple):
    """What a mask says, on every replay."""

    rows: Rows | None
    """None: the batch runs as it is."""
    is_full: bool = False
    """Whether there is no padding."""


def fix_rows(mask: Tensor, fixed: FixedRows) -> None:
    """Say what a mask says."""
    setattr(mask, _FIXED, fixed)


def get_fixed_rows(mask: Any) -> FixedRows | None:
    """What was said about it, if anything was."""
    found: FixedRows | None = getattr(mask, _FIXED, None)
    return found
