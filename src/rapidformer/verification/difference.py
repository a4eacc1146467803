"""One number or tensor of a run compared with the reference's."""

from __future__ import annotations

import math
from dataclasses import dataclass

LIMIT = 1e-5


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one number or tensor of a run is from the reference's."""

    value: float
    limit: float = LIMIT
    update: int | None = None
    name: str = ""
    process: int = 0
    cause: str = ""
    """A sentence that says what is wrong, where the quantity itself shows it."""
    summary: str = ""
    """The same in a few words, for the table."""

    @property
    def excess(self) -> float:
        """The difference as a multiple of the limit; NaN counts as the worst."""
        return math.inf if math.isnan(self.value) else self.value / self.limit

    @property
    def is_equal(self) -> bool:
        return self.excess <= 1.0

    def locate(self) -> str:
        parts = [self.name] if self.name else []
        parts += [f"step {self.update + 1}"] if self.update is not None else []
        place = ", ".join([*parts, f"rank {self.process}"])
        return place if self.is_equal or not self.summary else f"{place}: {self.summary}"


def divide(difference: float, size: float) -> float:
    """The difference relative to a size; infinite where something differs from nothing."""
    if not difference:
        return 0.0
    return difference / size if size else math.inf
