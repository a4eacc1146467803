"""The loss of each data set of a mixture: sums over the rows of a set, and what they are over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rapidformer.accel.fused_loss.noted import Note
from rapidformer.data.update import Mean
from rapidformer.objectives.objective import Terms


def compute_set_losses(
    terms: Terms, notes: Sequence[Note], sets: Tensor, names: Sequence[str]
) -> dict[str, Mean]:
    """The means of a micro-batch by name; over nothing if the losses of its rows are not known."""
    rows = _find_rows(terms, notes, len(sets)) or (torch.zeros_like(sets), torch.zeros_like(sets))
    totals = [
        torch.zeros(len(names) + 1, device=sets.device).index_add(0, sets, values.float())
        for values in rows
    ]
    means = totals[0] / totals[1].clamp(min=1)
    pairs = zip(means[:-1].unbind(), totals[1][:-1].unbind(), strict=True)
    return dict(zip(names, pairs, strict=True))


def _find_rows(terms: Terms, notes: Sequence[Note], size: int) -> tuple[Tensor, Tensor] | None:
    """The summed loss of each row and its count."""
    learnt = [term for term in terms.values() if term.weight]
    if len(learnt) != 1:
        return None  # several terms are means over different things
    if learnt[0].rows is not None:
        return learnt[0].rows if len(learnt[0].rows[0]) == size else None
    if not notes or any(len(note.losses) % size for note in notes):
        return None
    losses = sum(note.losses.view(size, -1).sum(1) for note in notes)
    counts = sum(note.counts.view(size, -1).sum(1) for note in notes)
    return torch.as_tensor(losses), torch.as_tensor(counts)
