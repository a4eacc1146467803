"""Tokens in chunks, and how much is left at one token of what came in at another."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.unpad.places import gather, scatter

SIZE = 64
"""Tokens of a chunk. A model's own size suits some kernel; results do not depend on it."""


@dataclass
class RowsOfChunks:
    """Of rows that lie in one sequence: a grid of each row's chunks, where its states pass on."""

    places: Tensor
    """Of each chunk in the flattened grid; chunks without a row share one place after it."""
    rows: int
    width: int

    def spread(self, values: Tensor) -> Tensor:
        """[1, chunks, ...] -> [rows, width, ...], with zeros after a row's chunks."""
        grid = scatter(values, self.places, self.rows * self.width + 1)
        return grid[:, :-1].unflatten(1, (self.rows, self.width)).squeeze(0)

    def collect(self, grid: Tensor) -> Tensor:
        """[rows, width, ...] -> [1, chunks, ...]; zeros for those without a row."""
        values = grid.flatten(0, 1)
        return gather(torch.cat([values, torch.zeros_like(values[:1])])[None], self.places)


ROWS: ContextVar[RowsOfChunks | None] = ContextVar("rows", default=None)
"""Set while the layer's only row is a sequence of several."""


def cut(values: Tensor) -> Tensor:
    """From [rows, tokens, ...] to [rows, chunks, tokens of a chunk, ...], zeros at the end."""
    missing = -values.shape[1] % SIZE
    padded = functional.pad(values, (0, 0) * (values.dim() - 2) + (0, missing))
    return padded.unflatten(1, (-1, SIZE))


def add_up(logs: Tensor) -> Tensor:
    """Logarithms of the decay from the start up to each place, in fp64: differences are taken."""
    # Not cumsum(), which --deterministic refuses on a GPU.
    return logs.double() @ logs.new_ones(logs.shape[-1:] * 2, dtype=torch.float64).triu()


def decay_between(sums: Tensor) -> Tensor:
    """The decay from place j (columns) to place i (rows), in fp32; nothing comes from later."""
    places = torch.arange(sums.shape[-1], device=sums.device)
    is_later = places > places[:, None]
    logs = (sums[..., :, None] - sums[..., None, :]).float()
    return logs.masked_fill(is_later, -torch.inf).exp()


def decay_to_end(sums: Tensor) -> Tensor:
    """The decay from each place to the last one, in fp32."""
    return (sums[..., -1:] - sums).float().exp()
