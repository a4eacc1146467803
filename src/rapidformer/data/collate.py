"""From rows to one batch: ragged lists are padded, everything else is stacked.

This is the default for any data set. Which columns are padded depends on what they hold, not on a
list of names; names only choose the padding value. transformers' collators make the same batches,
but need a tokenizer and another class for each kind of label. They also pad row by row, which takes
several times as long as filling one array per column.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.errors import DataError

_LABEL_NAMES = {"label": "labels", "label_ids": "labels"}
_DEFAULT_PADS: Mapping[str, int | float] = {"labels": IGNORED_LABEL, "special_tokens_mask": 1}


class PadCollator:
    """Pad to the longest row by ``pad_values``; by default labels with -100, the rest with 0."""

    def __init__(
        self,
        pad_values: Mapping[str, int | float] | None = None,
        pad_to_multiple_of: int | None = None,
        side: str = "right",
    ) -> None:
        if side not in ("left", "right"):
            raise ValueError(f"side is 'left' or 'right', not {side!r}")
        self.pad_values = {**_DEFAULT_PADS, **(pad_values or {})}
        self.pad_to_multiple_of = pad_to_multiple_of
        self.side = side

    def __call__(self, rows: list[Any]) -> Any:
        if not rows or not isinstance(rows[0], Mapping):
            return default_collate(rows)
        batch: dict[str, torch.Tensor] = {}
        for name in rows[0]:
            values = [row.get(name) for row in rows]
            if _is_stackable(values):
                key = str(_LABEL_NAMES.get(name, name))
                batch[key] = self._join(key, values)
        if "attention_mask" not in batch and "input_ids" in batch:
            self._add_attention_mask(batch, rows)
        return batch

    def _join(self, name: str, values: list[Any]) -> torch.Tensor:
        first = values[0]
        if isinstance(first, torch.Tensor):
            if all(value.shape == first.shape for value in values):
                return torch.stack(values)
            values = [value.numpy() for value in values]
            first = values[0]
        if isinstance(first, (np.ndarray, list, tuple)):
            return torch.from_numpy(self._join_arrays(name, values))
        is_float = any(isinstance(value, (float, np.floating)) for value in values)
        return torch.tensor(values, dtype=torch.float32 if is_float else torch.int64)

    def _join_arrays(self, name: str, values: list[Any]) -> np.ndarray:
        if _depth(values) == 1:
            return self._pad_rows(name, values)
        if isinstance(values[0], np.ndarray) and len({value.shape for value in values}) == 1:
            return np.stack(values)
        nested = [list(value) for value in values]
        height = max(len(value) for value in nested)
        if _depth(nested) == 2:
            # Choices x tokens: all inner rows are padded to one width, then regrouped.
            joined = self._pad_rows(name, [inner for value in nested for inner in value])
            counts = np.array([len(value) for value in nested])
            if (counts == height).all():
                return joined.reshape(len(nested), height, -1)
            shape = (len(nested), height, joined.shape[1])
            padded = np.full(shape, self.pad_values.get(name, 0), dtype=joined.dtype)
            padded[np.arange(height) < counts[:, None]] = joined
            return padded
        try:
            return _narrow(np.asarray(values))
        except ValueError:
            raise DataError(
                f"The column {name} holds nested lists of unequal shape, which cannot be padded."
            ) from None

    def _pad_rows(self, name: str, rows: Sequence[Any]) -> np.ndarray:
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        flat = _flatten(rows)
        width = int(lengths.max(initial=0))
        if self.pad_to_multiple_of and flat.dtype == np.int64:
            width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        if (lengths == width).all():
            return flat.reshape(len(rows), width)
        padded = np.full((len(rows), width), self.pad_values.get(name, 0), dtype=flat.dtype)
        padded[self._find_taken(lengths, width)] = flat
        return padded

    def _find_taken(self, lengths: np.ndarray, width: int) -> np.ndarray:
        """Where rows of these lengths are, in a batch of this width."""
        positions, counts = np.arange(width), lengths[:, None]
        return positions < counts if self.side == "right" else positions >= width - counts

    def _add_attention_mask(self, batch: dict[str, torch.Tensor], rows: list[Any]) -> None:
        ids = batch["input_ids"]
        lengths = np.array([len(row["input_ids"]) for row in rows])
        # Lists may have any length, so their batches always have a mask: one that appears only for
        # some batches would be another signature, and another compilation.
        is_list = isinstance(rows[0]["input_ids"], (list, tuple))
        if ids.dim() == 2 and (is_list or (lengths != ids.shape[1]).any()):
            taken = self._find_taken(lengths, ids.shape[1])
            batch["attention_mask"] = torch.from_numpy(taken.astype(np.int64))


def _is_stackable(values: list[Any]) -> bool:
    if any(value is None for value in values):
        return False
    first = values[0]
    while isinstance(first, (list, tuple)) and len(first):
        first = first[0]
    # An empty list says nothing about its kind: it is a row without tokens.
    numbers = (int, float, np.number, np.bool_, np.ndarray, torch.Tensor, list, tuple)
    return isinstance(first, numbers) and getattr(first, "dtype", None) != np.object_


def _depth(values: Sequence[Any]) -> int:
    """The nesting depth of each value."""
    depth = 0
    level: Any = values
    while True:
        level = next((item for item in level if isinstance(item, np.ndarray) or item), None)
        if isinstance(level, np.ndarray):
            return depth + level.ndim
        if not isinstance(level, (list, tuple)):
            return max(depth, 1)
        depth += 1


def _flatten(rows: Sequence[Any]) -> np.ndarray:
    if any(isinstance(row, np.ndarray) for row in rows):
        return _narrow(np.concatenate([np.asarray(row) for row in rows]))
    whole = array("q")
    try:
        for row in rows:
            whole.fromlist(row)
    except (TypeError, OverflowError):
        # Not integers throughout; a list may start with integers and still hold fractions.
        return _narrow(np.array(list(chain.from_iterable(rows))))
    return np.frombuffer(whole, dtype=np.int64) if whole else np.zeros(0, dtype=np.int64)


def _narrow(array: np.ndarray) -> np.ndarray:
    """Integers as int64 and fractions as they are, but never as wide as Python's floats."""
    if array.dtype.kind in "iub":
        return array.astype(np.int64, copy=False)
    return array.astype(np.float32, copy=False) if array.dtype == np.float64 else array
