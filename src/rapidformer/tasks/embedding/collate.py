"""Batches of items: all texts of a micro-batch are rows of one padded tensor.

The model is called once for queries and documents together. ``slots`` says which of its rows belong
to which item: ``[items, texts]``, -1 where an item has fewer texts than others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rapidformer.data.collate import PadCollator
from rapidformer.errors import DataError

Batch = dict[str, torch.Tensor]
_FIELDS = ("input_ids", "token_type_ids")


class ItemCollator:
    """Makes a batch of items; each has room for at least ``texts`` texts and ``scores`` scores, so
    that the batches of an update can be joined."""

    def __init__(
        self, pads: Mapping[str, int | float], side: str, *, texts: int, scores: int
    ) -> None:
        self._pad = PadCollator(pads, side=side)
        self._texts, self._scores = texts, scores

    def join(self, other: ItemCollator) -> ItemCollator:
        """One with room for the items of both."""
        joined = copy.copy(self)
        joined._texts = max(self._texts, other._texts)
        joined._scores = max(self._scores, other._scores)
        return joined

    def check(self, item: dict[str, Any]) -> dict[str, Any]:
        """An item of a stream, if there is room for it."""
        if (texts := len(item["text_ids"])) > self._texts:
            raise DataError(
                f"{texts} texts (the query and its documents), but the first rows of the stream "
                f"have at most {self._texts}: a row with the most texts must be among them."
            )
        return item

    def __call__(self, items: list[dict[str, Any]]) -> Batch:
        counts = torch.tensor([len(item["input_ids"]) for item in items])
        ids = _fill([item["text_ids"] for item in items], self._texts, 0)
        places = torch.arange(ids.shape[1])
        slots = (counts.cumsum(0) - counts)[:, None] + places
        # First, since the first tensor of a batch says how many rows it has.
        batch = {"slots": slots.masked_fill(places >= counts[:, None], -1), "text_ids": ids}
        if self._scores:
            batch["scores"] = _fill([item["scores"] for item in items], self._scores, float("nan"))
        rows = [
            {name: item[name][number] for name in _FIELDS if name in item}
            for item in items
            for number in range(len(item["input_ids"]))
        ]
        batch |= self._pad(rows)
        if "prompts" in items[0]:
            lengths = torch.tensor([length for item in items for length in item["prompts"]])
            batch["pooled"] = leave_out(batch["attention_mask"], lengths)
        return batch


def _fill(values: Sequence[Sequence[Any]], width: int, pad: float) -> torch.Tensor:
    width = max(width, *map(len, values))
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in values])


def leave_out(mask: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """The mask without the first tokens of each row."""
    return mask * (mask.cumsum(1) > prompts[:, None])


def get_inputs(batch: Batch) -> Batch:
    """What the model takes of a batch."""
    return {name: batch[name] for name in (*_FIELDS, "attention_mask") if name in batch}
