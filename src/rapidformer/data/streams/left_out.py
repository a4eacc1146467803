"""A row that stays in its batch although nothing is learnt from it. Tasks import this early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LeftOut(dict[str, Any]):
    """A sample without labels, of a row that the model cannot learn from."""

    def __init__(self, sample: Mapping[str, Any], reason: str) -> None:
        super().__init__(sample)
        self.reason = reason
