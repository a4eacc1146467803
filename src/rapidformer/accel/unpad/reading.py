"""Whether a loss reads what the model returns for padding, which is not the same without it.

The model's own loss ignores padding, but a user's may read all of ``outputs.logits``. That cannot
be known beforehand, so the first batch runs padded, and the gradient tells: it is zero for padding
if and only if nothing behind the blocks depends on it. Checkpoints hold what was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rapidformer.accel.unpad.rows import Rows
from rapidformer.accel.unpad.sides import Sides
from rapidformer.log import warn_once

_OBSERVED: ContextVar[tuple[PaddingReader, Rows | Sides] | None] = ContextVar(
    "padding", default=None
)


class PaddingReader:
    """What is known about a model's loss."""

    def __init__(self, *, is_trusted: bool) -> None:
        self._is_trusted = is_trusted
        """Whether the user has said that the loss ignores padding (--dynamic-shape on)."""
        self._reads_padding: bool | None = None

    @property
    def ignores_padding(self) -> bool:
        """False without gradients: there, nothing shows who reads the logits."""
        is_seen = self._reads_padding is False and torch.is_grad_enabled()
        return self._is_trusted or is_seen

    @property
    def is_decided(self) -> bool:
        """Whether it is known what the loss reads."""
        return self._is_trusted or self._reads_padding is not None

    def state_dict(self) -> dict[str, Any]:
        return {"reads_padding": self._reads_padding}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = state.get("reads_padding")
        self._reads_padding = found if isinstance(found, bool) else None

    @contextmanager
    def observe(self, rows: Rows | Sides) -> Iterator[None]:
        """Look at the gradient of the call inside, unless it is known what the loss reads."""
        if self._reads_padding is not None or not torch.is_grad_enabled():
            yield
            return
        token = _OBSERVED.set((self, rows))
        try:
            yield
        finally:
            _OBSERVED.reset(token)

    def look(self, rows: Rows, gradient: Tensor) -> None:
        """Learn from the gradient of the last block's output."""
        flat = gradient.detach().flatten(0, 1)
        of_real = flat.index_select(0, rows.places)
        total, real = (int(each.count_nonzero()) for each in (flat, of_real))
        if real == 0 and total == 0:
            return  # a batch without weight says nothing
        # An encoder's output is looked at after its decoder's.
        self._reads_padding = bool(self._reads_padding) or total > real
        if self._reads_padding:
            warn_once(
                "--dynamic-shape: the loss depends on what the model returns for padding, so "
                "padding is not removed. Mask it in the loss to train faster.",
                is_local=True,
            )


def observe_output(hidden: Tensor, *, is_decoder: bool) -> None:
    """Tell the reader, if there is one, of the last block's output on a padded batch."""
    observed = _OBSERVED.get()
    if observed is not None and hidden.requires_grad:
        reader, rows = observed
        if isinstance(rows, Sides):
            rows = rows.decoder if is_decoder else rows.encoder
        if rows.is_padded(hidden):
            hidden.register_hook(partial(reader.look, rows))
