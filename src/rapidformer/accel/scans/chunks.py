"""Tokens in chunks, and how much is left at one token of what came in at another."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional

SIZE = 64
"""Tokens of a chunk. A model's own size suits some kernel; results do not depend on it."""


NEW_ROWS: ContextVar[Tensor | None] = ContextVar("new_rows", default=None)
"""Of rows that lie in one sequence: which of its chunks begin one, and take over no state."""


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
