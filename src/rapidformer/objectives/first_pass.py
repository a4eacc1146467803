"""The first pass over an update: what the losses of its rows must know of all other rows.

It has no gradient. The second pass of each micro-batch draws the random numbers of its first one
again, so both see the same dropout masks, and the run goes on as if there had been one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rapidformer.data.batch import count_rows
from rapidformer.data.update import Update, move_micro_batch
from rapidformer.dist.collectives import gather_rows
from rapidformer.dist.topology import Topology
from rapidformer.errors import RapidformerError
from rapidformer.objectives.objective import Objective

_MOST_ROWS = 2**24
"""More than a micro-batch can have: orders rows by micro-batch, then by their place in it."""


class RandomState:
    """The state of torch's random numbers on the host and on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device, self._device)


def survey(
    objective: Objective, model: Any, update: Update, topology: Topology, device: torch.device
) -> list[dict[str, Any]]:
    """For each micro-batch the rows of the whole update, its places in them, its random state."""
    if topology.pipeline > 1:
        raise RapidformerError(
            f"{type(objective).__name__} looks at the whole update before its losses, which a "
            "model in stages cannot do: use --tensor-model-parallel-size or "
            "--zero-3-memory-optimization instead of --pipeline-model-parallel-size."
        )
    states, passes = [], []
    for micro_batch in update:
        states.append(RandomState(device))
        passes.append(look(objective, model, move_micro_batch(micro_batch, device).batch))
    counted = list(zip(update, passes, strict=True))
    sizes = [0 if micro_batch.is_filler else count_rows(rows) for micro_batch, rows in counted]
    numbers = [_MOST_ROWS * micro_batch.number + torch.arange(size, device=device)
               for micro_batch, size in zip(update, sizes, strict=True)]  # fmt: skip
    # In the order of the samples, so that nothing depends on who held which of them.
    everyone, order = gather_rows(torch.cat(numbers), topology).sort()

    def join(name: str) -> Tensor:
        mine = [rows[name][:size] for rows, size in zip(passes, sizes, strict=True)]
        return gather_rows(torch.cat(mine), topology)[order]

    shared = objective.summarize({name: join(name) for name in passes[0]})
    # A filler's loss does not count, but it is computed: in the place of other rows.
    places = [
        torch.searchsorted(everyone, mine) if size else torch.arange(count_rows(rows)).to(device)
        for mine, rows, size in zip(numbers, passes, sizes, strict=True)
    ]
    return [
        {"random": state, "rows": shared, "places": place}
        for state, place in zip(states, places, strict=True)
    ]


def look(objective: Objective, model: Any, batch: Any) -> Mapping[str, Tensor]:
    """The first pass of one micro-batch."""
    with torch.no_grad(), _keeping_buffers(model):
        return objective.first_pass(model, batch)


@contextmanager
def _keeping_buffers(model: Any) -> Iterator[None]:
    """Running statistics must see a batch once."""
    buffers = list(model.buffers())
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, value in zip(buffers, before, strict=True):
        buffer.copy_(value)
