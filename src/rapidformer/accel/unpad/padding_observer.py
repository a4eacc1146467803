"""Find out whether a loss reads the model's outputs for padding, which unpadding changes.

The model's own loss ignores padding, but a user's may read all of ``outputs.logits``. That cannot
be known in advance, so the first batch runs padded, and its gradient shows it: for padding it is
zero if and only if nothing after the blocks depends on padding. The answer is saved in checkpoints.
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

_OBSERVED: ContextVar[tuple[PaddingObserver, Rows | Sides] | None] = ContextVar(
    "padding", default=None
)


class PaddingObserver:
    """What is known about a loss: whether it reads outputs for padding."""

    def __init__(self, *, is_trusted: bool) -> None:
        self._is_trusted = is_trusted
        """Whether the user has said that the loss ignores padding (--dynamic-shape on)."""
        self._reads_padding: bool | None = None

    @property
    def ignores_padding(self) -> bool:
        """False without gradients: nothing shows then who reads the logits."""
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
        """Watch the gradient of the forward pass inside, unless the answer is known."""
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
            return  # a gradient of zero says nothing
        # In an encoder-decoder model, this is called for both outputs.
        self._reads_padding = bool(self._reads_padding) or total > real
        if self._reads_padding:
            warn_once(
                "--dynamic-shape: the loss depends on what the model returns for padding, so "
                "padding is not removed. Mask it in the loss to train faster.",
                is_local=True,
            )


def observe_output(hidden: Tensor, *, is_decoder: bool) -> None:
    """Watch the last block's output of a padded batch, if someone observes."""
    observed = _OBSERVED.get()
    if observed is not None and hidden.requires_grad:
        observer, rows = observed
        if isinstance(rows, Sides):
            rows = rows.decoder if is_decoder else rows.encoder
        if rows.is_padded(hidden):
            hidden.register_hook(partial(observer.look, rows))
