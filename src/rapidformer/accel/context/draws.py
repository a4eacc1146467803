"""Random numbers of ranks that split sequences: different inside the blocks, equal outside.

Outside the blocks every rank computes the whole sequence, so different dropout masks there would
make gradients wrong; inside, equal masks would drop the same units in every slice of the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rapidformer.dist.context_region import ContextRegion


class OwnDraws:
    """Switches to this rank's own random numbers and back."""

    def __init__(self, region: ContextRegion, *, is_needed: bool) -> None:
        self._region = region
        self._is_needed = is_needed
        self._device: torch.device | None = None
        self._before: list[Tensor] = []

    def start(self, device: torch.device, *, is_needed: bool) -> None:
        if not (self._is_needed and is_needed):
            return
        seed = int(torch.randint(2**40, ()))
        self._device = device
        self._before = [torch.get_rng_state()]
        if device.type == "cuda":
            self._before.append(torch.cuda.get_rng_state(device))
        torch.manual_seed(seed + self._region.rank)

    def stop(self) -> None:
        if not self._before:
            return
        torch.set_rng_state(self._before[0])
        if len(self._before) > 1:
            assert self._device is not None
            torch.cuda.set_rng_state(self._before[1], self._device)
        self._before = []
