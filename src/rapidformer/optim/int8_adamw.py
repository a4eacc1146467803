"""AdamW whose moments are kept in 8 bits: torchao's, an optional package.

Every 256 consecutive values have a scale in common, so a slice or shard of a moment means nothing:
weights must be whole. Moments of fewer than 4096 values stay in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torchao.optim import AdamW8bit


class Int8AdamW(AdamW8bit):
    """torchao's optimizer, with floats as learning rates; tensors, as it wants, in a step only."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        Optimizer.add_param_group(self, param_group)  # torchao's would turn the rate into a tensor

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))
        try:
            loss: float | None = super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
        return loss
