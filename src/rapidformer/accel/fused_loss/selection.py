"""The rows of hidden states that may have a label: a loss needs no logits of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rapidformer.accel.unpad.on_demand import Unpadded, lacks_padding, settle
from rapidformer.accel.unpad.places import gather
from rapidformer.accel.unpad.rows import Layout
from rapidformer.accel.unpad.tokenwise import pick_labelled
from rapidformer.compat.torch_tensors import check_later


@dataclass(frozen=True)
class Selection:
    """The rows that may have a label."""

    rows: Tensor
    labels: Tensor
    count: int
    """Of all rows."""
    layout: Layout | None
    """Set if these are real tokens of a padded batch."""
    index: Tensor | None
    """Which of those have a label; None if the host does not know."""

    def take(self, other: Tensor) -> Tensor:
        """The same rows of another tensor."""
        other = other.pad_with(0.0) if lacks_padding(other) and other.is_promised else settle(other)
        if self.layout is not None:
            other = self.layout.take(other)[0, : len(self.layout.places)]
        return other if self.index is None else other[self.index]

    def put_back(self, values: Tensor) -> Tensor:
        """Values of all rows from those of these; 0 for the others."""
        if self.index is not None:
            count = self.count if self.layout is None else len(self.layout.places)
            zeros = values.new_zeros(count, *values.shape[1:])
            values = zeros.index_copy(0, self.index, values)
        return values if self.layout is None else self.layout.spread(values[None], 0.0)


def select_labelled(
    hidden: Tensor, labels: Tensor, ignored: int, index: Tensor | None = None
) -> Selection:
    """The rows of ``hidden``, [rows, size], that may have a label; ``index`` has those that do."""
    count, layout = len(labels), None
    picked = pick_labelled(hidden, labels, ignored)
    if picked is None:
        rows = settle(hidden)
    else:
        rows, labels = picked
        layout = hidden.token_layout  # type: ignore[attr-defined]
        index = None if index is None else layout.find_tokens(index)
    if index is None and rows.device.type == "cpu":
        # Not on a GPU: the host would wait to learn how many rows are selected.
        index = (labels != ignored).nonzero().squeeze(1)
    if index is None and isinstance(hidden, Unpadded) and picked is not None:
        index = _find_labelled(labels, ignored, hidden.labelled)
    if index is not None:
        rows, labels = gather(rows[None], index)[0], labels[index]
    return Selection(rows, labels, count, layout, index)


def _find_labelled(labels: Tensor, ignored: int, bound: int | None) -> Tensor | None:
    """``bound`` different places, which have all labels among them; the host does not wait."""
    if bound is None or not 0 < bound < len(labels):
        return None
    is_ignored = labels == ignored
    check_later((~is_ignored).sum() <= bound, "a loss has more labels than its batch")
    return is_ignored.to(torch.uint8).sort(stable=True).indices[:bound]
