"""Batches at fixed places in memory, which a graph reads whenever it is replayed.

A batch's key is everything that Python code can see of it; the values of its tensors are copied.
There must be few keys, so a batch whose padding is removed is first padded to one of a few widths.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.unpad.fixed import FixedRows, fix_rows
from rapidformer.accel.unpad.switch import read_fixed_rows
from rapidformer.data.batch import IGNORED_LABEL, get_host_copy
from rapidformer.errors import RapidformerError

_WIDTHS = 64
"""Padded batches have a multiple of this many columns."""
_PLAIN = (type(None), bool, int, float, str)


class NotRepeatableError(RapidformerError):
    """Why a batch or a step cannot be replayed."""


@dataclass(frozen=True)
class Inputs:
    """A micro-batch and what a model would read off its mask."""

    batch: Any
    columns: int | None
    """The width to which tensors with a value per token are padded; None: they are not."""
    fills: Mapping[str, int]
    """The value of the columns added to each of them."""
    fixed: FixedRows | None
    key: Hashable

    @property
    def is_rounded(self) -> bool:
        """Whether its sizes were rounded up."""
        return self.columns is not None

    def pad(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor with its columns added, if it gets any."""
        if self.columns is None or name not in self.fills:
            return tensor
        return functional.pad(tensor, (0, self.columns - tensor.shape[1]), value=self.fills[name])


def read_inputs(model: nn.Module, batch: Any) -> Inputs | None:
    """Prepare a batch, from host memory only; None if it must run unchanged (``reading.py``)."""
    columns, fills, fixed = None, dict[str, int](), None
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and isinstance(labels, Tensor) and mask.dim() == 2:
        is_real = get_host_copy(mask)
        targets = get_host_copy(labels) if labels.shape == mask.shape else labels
        columns, fills = _choose_columns(model, batch, mask)
        if columns is not None:
            added = columns - mask.shape[1]
            wide = (
                functional.pad(targets, (0, added), value=IGNORED_LABEL)
                if "labels" in fills
                else targets
            )
            fixed = read_fixed_rows(model, functional.pad(is_real, (0, added)), wide)
            if fixed is None:
                return None
        if fixed is None or fixed.rows is None:
            # If padding stays in the batch, more of it could change the loss.
            columns, fixed = None, FixedRows(None, is_full=bool(is_real.all()))
    sizes = fixed.rows.sizes if fixed is not None and fixed.rows is not None else None
    is_full = fixed is not None and fixed.is_full
    key = (_describe(batch, "", fills, columns), sizes, is_full)
    return Inputs(batch, columns, fills, fixed, key)


def _choose_columns(
    model: Any, batch: Mapping[str, Any], mask: Tensor
) -> tuple[int | None, dict[str, int]]:
    """The next width and the values to pad with; None if one of these values is unknown."""
    config = getattr(model, "config", None)
    pad = getattr(config, "pad_token_id", None)
    fills = {
        "input_ids": pad if isinstance(pad, int) and pad >= 0 else 0,
        "attention_mask": 0,
        "token_type_ids": 0,
        "labels": IGNORED_LABEL,
    }
    shaped = {
        name
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.shape[:2] == mask.shape
    }
    is_known = all(name in fills and batch[name].dim() == 2 for name in shaped)
    most = getattr(config, "max_position_embeddings", None)
    columns = -(-mask.shape[1] // _WIDTHS) * _WIDTHS
    if isinstance(most, int):
        columns = max(min(columns, most), mask.shape[1])
    return (columns if is_known else None), {name: fills[name] for name in shaped & set(fills)}


class StaticInputs:
    """A batch whose tensors keep their places."""

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self._tensors: dict[str, Tensor] = {}

        def place(name: str, tensor: Tensor) -> Tensor:
            self._tensors[name] = inputs.pad(name, tensor).to(device, copy=True)
            return self._tensors[name]

        self._batch = _rebuild(inputs.batch, place)
        self._rows = None
        if inputs.fixed is not None:
            rows = inputs.fixed.rows
            self._rows = rows.copy_to(device) if rows is not None else None
            fix_rows(self._batch["attention_mask"], inputs.fixed._replace(rows=self._rows))

    @property
    def batch(self) -> Any:
        """For one forward step, which may add and remove entries."""
        return _rebuild(self._batch, lambda name, tensor: tensor)

    def fill(self, inputs: Inputs) -> None:
        """Copy a batch with the same key."""

        def copy(name: str, tensor: Tensor) -> Tensor:
            return self._tensors[name].copy_(inputs.pad(name, tensor), non_blocking=True)

        _rebuild(inputs.batch, copy)
        if self._rows is not None:
            assert inputs.fixed is not None
            assert inputs.fixed.rows is not None
            self._rows.overwrite(inputs.fixed.rows)


def _rebuild(batch: Any, place: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """The same nested batch with other tensors; ``place`` gets each one's path."""
    if isinstance(batch, Tensor):
        return place(path, batch)
    if isinstance(batch, Mapping):
        made = {key: _rebuild(value, place, _join(path, key)) for key, value in batch.items()}
        # Hugging Face's BatchEncoding and similar allow batch.input_ids.
        return made if isinstance(batch, dict) else type(batch)(made)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        items = [_rebuild(value, place, _join(path, i)) for i, value in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _describe(batch: Any, path: str, fills: Mapping[str, int], columns: int | None) -> Hashable:
    """Everything that Python code can see of a batch, except the values of its tensors."""
    if isinstance(batch, Tensor):
        shape = tuple(batch.shape)
        if columns is not None and path in fills:
            shape = (shape[0], columns)
        return shape, batch.dtype
    if isinstance(batch, Mapping):
        items = batch.items()
        return tuple((key, _describe(v, _join(path, key), fills, columns)) for key, v in items)
    if isinstance(batch, (list, tuple)):
        return tuple(
            _describe(value, _join(path, i), fills, columns) for i, value in enumerate(batch)
        )
    if isinstance(batch, _PLAIN):
        return batch
    raise NotRepeatableError(f"its batches hold {type(batch).__name__} objects")


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
