"""Loss scaling for fp16, with hysteresis.

The engine removes the scale when it divides the gradients anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rapidformer.dist.collectives import broadcast_object
from rapidformer.errors import TrainingError


@dataclass(eq=False, kw_only=True)
class LossScaler:
    """Keeps fp16 gradients in range: a fixed factor, or one that adapts."""

    fixed: float | None = None
    initial: float = 2.0**16
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    weight_unit: float | None = None
    """The unit for loss weights when several ranks add them: close to a typical weight, so that
    many labels do not use up fp16's range. A power of two, so it changes no bits."""

    def __post_init__(self) -> None:
        self.scale = self.fixed if self.fixed is not None else self.initial
        self._patience, self._clean_updates = self.hysteresis, 0

    def agree_on_unit(self, weight: float) -> None:
        """Use the first rank's current weight; every rank must call this."""
        self.weight_unit = broadcast_object(2.0 ** round(math.log2(max(weight, 1.0))))

    def update(self, *, overflowed: bool) -> None:
        """Halve after too many overflows, double after enough steps without one."""
        if self.fixed is not None:
            return
        if overflowed:
            self._clean_updates = 0
            self._patience -= 1
            if self.scale <= self.minimum:
                raise TrainingError(
                    f"the gradient is not finite although the loss scale is {self.scale:g}: this "
                    "is not an fp16 overflow. Check the data and the loss, or lower --lr."
                )
            if self._patience <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self._clean_updates += 1
        if self._clean_updates == self.window:
            self._clean_updates = 0
            self._patience = self.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, float]:
        return {
            "scale": self.scale,
            "patience": self._patience,
            "clean_updates": self._clean_updates,
            "weight_unit": self.weight_unit or 0.0,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.fixed is not None:
            return  # a fixed scale given now applies, whatever the checkpoint had
        self.scale = float(state["scale"])
        self._patience = int(state["patience"])
        self._clean_updates = int(state["clean_updates"])
        self.weight_unit = state.get("weight_unit") or None
