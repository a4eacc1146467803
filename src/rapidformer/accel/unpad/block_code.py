"""Code of the user's own in blocks: what a trial has shown holds for the numbers that it reads.

A trial cannot show what code will do after ``block.alpha = 0.1``. So its source is read for what it
depends on besides tensors, and while any of that differs, batches keep their padding. Code that
cannot be judged like this keeps it from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from torch import nn

from rapidformer.accel.cuda_graph.examination import Examination
from rapidformer.accel.cuda_graph.host_state import CONSTANTS
from rapidformer.accel.cuda_graph.pure_calls import is_pure
from rapidformer.log import warn_once
from rapidformer.models.watched import is_from_user
from rapidformer.overlay import get_own_class


class BlockCode:
    """What the user's own code in blocks depends on; library code was tried for good."""

    problem: str | None = None
    """Why that cannot be known."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        modules = [module for block in blocks for module in block.modules()]
        self._own = [m for m in modules if _is_own(get_own_class(m)) or "forward" in vars(m)]
        if not self._own:
            return
        self._examination = Examination((), nn.ModuleList(blocks))
        effect = self._examination.effect
        if effect is not None:
            self.problem = f"{effect.place} {effect.what}".lstrip()
        self.note()

    def note(self) -> None:
        """What it depends on now is what was tried."""
        self._tried = self._read() if self._own else []

    def has_changed(self) -> bool:
        """Whether it depends on other numbers now than when it was tried."""
        now = self._read() if self._own else []
        if not self._own or now == self._tried:
            return False
        pairs = zip_longest(self._tried, now, fillvalue=("a number", None))
        name = next(new[0] for old, new in pairs if old != new)
        warn_once(
            f"--dynamic-shape: code in the model's blocks reads {name}, which has changed since "
            "compose(), where it was tried. Batches keep their padding while it differs.",
            is_local=True,
        )
        return True

    def _read(self) -> list[tuple[str, Any]]:
        held = ((name, value) for module in self._own for name, value in vars(module).items())
        numbers = [
            (f"self.{name}", _copy(value))
            for name, value in held
            if isinstance(value, (*CONSTANTS, dict, list, tuple, set)) and _is_public(name)
        ]
        return [*self._examination.read_values(), *numbers]


def _copy(value: Any) -> Any:
    """The constants in a collection, as they are now."""
    if isinstance(value, dict):
        return [(key, _copy(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [_copy(each) for each in value]
    return value if isinstance(value, CONSTANTS) else None


def _is_public(name: str) -> bool:
    """Whether it is an attribute of the user's own; torch's tables begin like this."""
    return name != "training" and not name.startswith("_")


def _is_own(cls: type[nn.Module]) -> bool:
    return is_from_user(cls) and not is_pure(cls)
