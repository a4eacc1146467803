"""The losses of single tokens or rows, noted on the way to the mean that a model returns.

Where torch would add up cross entropies at once, they are taken one by one and added up here, and
the fused loss has them anyway. Their gradients are the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.fused_loss.selection import Selection
from rapidformer.accel.unpad.on_demand import Unpadded, settle
from rapidformer.accel.unpad.tokenwise import pick_labelled
from rapidformer.compat.patches import Entry, Patch


class Note(NamedTuple):
    """One call of a loss function."""

    losses: Tensor
    """Of each token or row, without gradient; 0 where there is no label."""
    counts: Tensor
    """1 where there is a label."""


_notes: ContextVar[list[Note] | None] = ContextVar("notes", default=None)


@contextmanager
def noting() -> Iterator[list[Note]]:
    """Note the losses that are computed inside, for this thread."""
    notes: list[Note] = []
    token = _notes.set(notes)
    try:
        with _LOSSES:
            yield notes
    finally:
        _notes.reset(token)


def is_noting() -> bool:
    return _notes.get() is not None


def note(losses: Tensor, labels: Tensor, ignored: int) -> None:
    """Note the losses of labels, if anybody wants them."""
    if (notes := _notes.get()) is not None:
        notes.append(Note(losses.detach(), labels != ignored))


def _build_cross_entropy(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def cross_entropy(input: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
        reduction, ignored = options.get("reduction", "mean"), options.get("ignore_index", -100)
        others = [options.get(name) for name in ("weight", "size_average", "reduce")]
        is_plain = not args and others == [None] * 3 and reduction in ("mean", "sum")
        is_labelled = target.dim() == 1 and not target.is_floating_point()
        is_noted = is_noting() and is_plain and is_labelled
        picked = _pick(input, target, ignored) if is_noted else None
        if picked is None:
            return original(input, target, *args, **options)
        rows, labels, put_back = picked
        losses = original(rows, labels, **{**options, "reduction": "none"})
        note(put_back(losses.detach()), target, ignored)
        total = losses.sum()
        return total / (labels != ignored).sum() if reduction == "mean" else total

    return cross_entropy


def _pick(
    logits: Tensor, labels: Tensor, ignored: int
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]] | None:
    """The rows to compute losses of, their labels, and how to get those of all rows again."""
    if logits.dtype not in (torch.float32, torch.float64):
        return None  # adding up rounded losses would be less exact
    if isinstance(logits, Unpadded):
        picked = pick_labelled(logits, labels, ignored)
        if picked is not None:
            chosen = Selection(*picked, len(labels), logits.token_layout, None)
            return *picked, chosen.put_back
        logits = settle(logits)
    return (logits, labels, lambda losses: losses) if type(logits) is Tensor else None


def _build_elementwise(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of numbers, whose mean over a row is the loss of the row."""

    def compute(input: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
        others = [*args, *(value for name, value in options.items() if name != "reduction")]
        is_plain = options.get("reduction", "mean") == "mean" and others == [None] * len(others)
        if is_noting() and is_plain and type(input) is Tensor and input.dim():
            # A second time: it is cheap, and adding the losses up here would round differently.
            losses = original(input.detach(), target, reduction="none")
            rows = losses.reshape(len(losses), -1).mean(1)
            note(rows, torch.zeros_like(rows), -1)
        return original(input, target, *args, **options)

    return compute


_LOSSES = Patch(
    lambda: [
        Entry(functional, "cross_entropy", _build_cross_entropy),
        Entry(functional, "mse_loss", _build_elementwise),
        Entry(functional, "binary_cross_entropy_with_logits", _build_elementwise),
    ]
)
