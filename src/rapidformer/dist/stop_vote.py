"""The optimizer step at which all ranks stop, agreed upon without a collective.

A signal reaches the ranks one by one, at different steps, or only one of them; the others then ask
for it now and then. Each posts the step at which it noticed, and continues training: another rank
may be waiting for it in a collective. Once all have posted, the run stops two steps after the
latest.

Why nobody is past that step by then: a rank that has noticed waits for its device after every step,
so the others have at least begun the step that it ends. A post that it has not seen after a step
therefore comes from that step or a later one, on a rank that shares its collectives; the second
step is for those that only share them with a third.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from rapidformer.compat.torch_distributed import get_default_store
from rapidformer.dist.collectives import is_alone

_MARGIN = 2
_numbers = itertools.count()


class StopVote:
    """This rank's part in the vote."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A process may train twice; what was posted stays in the store.
        self._key = f"rapidformer/stop/{next(_numbers)}"
        self._has_posted = False
        self._last_step: int | None = None

    def find_signal(self) -> int | None:
        """The signal that another rank has caught, if any."""
        key = f"{self._key}/signal"
        if is_alone() or not get_default_store().check([key]):
            return None
        return int(get_default_store().get(key))

    def is_over(self, step: int, number: int) -> bool:
        """Whether to stop after this step; ask after every step once signal ``number`` was caught."""
        if is_alone():
            return True
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        store = get_default_store()
        if not self._has_posted:
            store.set(f"{self._key}/signal", str(number))
            store.set(f"{self._key}/{dist.get_rank()}", str(step))
            self._has_posted = True
        keys = [f"{self._key}/{rank}" for rank in range(dist.get_world_size())]
        if self._last_step is None and store.check(keys):
            self._last_step = max(int(store.get(key)) for key in keys) + _MARGIN
        return self._last_step is not None and step >= self._last_step
