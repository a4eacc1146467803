"""Copy batches to fixed addresses, where a graph reads them at every replay.

A batch's key is everything that Python code can see of it except the values of its tensors, and
there is a graph for each key. To keep keys few, a batch that runs unpadded is first padded to one
of a few widths.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.cuda_graph.packed import Array, PackedTensors
from rapidformer.accel.unpad.batches import read_fixed_rows
from rapidformer.accel.unpad.fixed import FixedRows, fix_rows
from rapidformer.accel.unpad.rows import Rows
from rapidformer.data.batch import IGNORED_LABEL, find_host_copy, fits_numpy, get_host_copy
from rapidformer.data.nested import join, map_tensors
from rapidformer.errors import RapidformerError

_WIDTHS = 64
"""Padded batches have a multiple of this many columns."""
_PLAIN = (type(None), bool, int, float, str)


class NotRepeatableError(RapidformerError):
    """Why a batch or a step cannot be replayed."""


@dataclass(frozen=True)
class Inputs:
    """A micro-batch, and what the model would read off its mask."""

    batch: Any
    arrays: Mapping[str, Array]
    """The padded values of its tensors in host memory, by path in the batch."""
    others: Mapping[str, Tensor]
    """Tensors that are only on the device, or whose dtype NumPy does not have."""
    is_rounded: bool
    """Whether columns were added."""
    fixed: FixedRows | None
    key: Hashable

    @property
    def rows(self) -> Rows | None:
        return self.fixed.rows if self.fixed is not None else None

    def list_arrays(self) -> list[Array]:
        """All values in host memory: those of the batch, then those of its rows."""
        rows = [tensor.numpy() for tensor in self.rows.tensors] if self.rows is not None else []
        return [*self.arrays.values(), *rows]


def read_inputs(model: nn.Module, batch: Any, *, sizes_up: int = 0) -> Inputs | None:
    """Prepare a batch, from host memory only; None if it must run as it is.

    That is the case until the loss has been seen on a padded batch (``padding_observer.py``).
    ``sizes_up`` rounds the number of tokens up to a later size.
    """
    columns, fills, fixed = None, dict[str, int](), None
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and isinstance(labels, Tensor) and mask.dim() == 2:
        is_real = get_host_copy(mask).bool().numpy()
        targets = get_host_copy(labels) if labels.shape == mask.shape else labels
        columns, fills = _choose_columns(model, batch, mask)
        if columns is not None:
            wide = _pad(targets, columns, IGNORED_LABEL) if "labels" in fills else targets
            fixed = read_fixed_rows(model, _widen(is_real, columns, 0), wide, sizes_up)
            if fixed is None:
                return None
        if fixed is None or fixed.rows is None:
            # If padding stays in the batch, more of it could change the loss.
            columns, fixed = None, FixedRows(None, is_full=bool(is_real.all()))
    arrays, others = _read_values(batch, fills, columns)
    sizes = fixed.rows.sizes if fixed is not None and fixed.rows is not None else None
    is_full = fixed is not None and fixed.is_full
    key = (_describe(batch, "", fills, columns), tuple(arrays), sizes, is_full)
    return Inputs(batch, arrays, others, columns is not None, fixed, key)


def _read_values(
    batch: Any, fills: Mapping[str, int], columns: int | None
) -> tuple[dict[str, Array], dict[str, Tensor]]:
    """A batch's tensors by path: those in host memory as arrays, and all others."""
    arrays: dict[str, Array] = {}
    others: dict[str, Tensor] = {}

    def read(name: str, tensor: Tensor) -> Tensor:
        found = find_host_copy(tensor)
        if found is not None and fits_numpy(found):
            value = found.numpy()
            arrays[name] = _widen(value, columns, fills.get(name))
        else:
            others[name] = _pad(tensor, columns, fills.get(name))
        return tensor

    map_tensors(batch, read)
    return arrays, others


def _widen(array: Array, columns: int | None, fill: int | None) -> Array:
    """Add columns on the right, unless the array has none to fill."""
    if columns is None or fill is None:
        return array
    wide = np.full((len(array), columns), fill, dtype=array.dtype)
    wide[:, : array.shape[1]] = array
    return wide


def _pad(tensor: Tensor, columns: int | None, fill: int | None) -> Tensor:
    """``_widen`` for a tensor."""
    if columns is None or fill is None:
        return tensor
    return functional.pad(tensor, (0, columns - tensor.shape[1]), value=fill)


def _choose_columns(
    model: Any, batch: Mapping[str, Any], mask: Tensor
) -> tuple[int | None, dict[str, int]]:
    """The next width and what to pad each tensor with; no width if that is unknown for one."""
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
    """A batch whose tensors keep their addresses."""

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self._packed = PackedTensors(inputs.list_arrays(), device)
        self._others = {name: t.to(device, copy=True) for name, t in inputs.others.items()}
        tensors = {**dict(zip(inputs.arrays, self._packed.tensors, strict=False)), **self._others}
        self._batch = map_tensors(inputs.batch, lambda name, tensor: tensors[name])
        rows = inputs.rows
        self._rows = rows.fix(*self._packed.tensors[-3:]) if rows is not None else None
        if inputs.fixed is not None:
            fix_rows(self._batch["attention_mask"], inputs.fixed._replace(rows=self._rows))

    @property
    def batch(self) -> Any:
        """A copy of the containers, since a forward step may add and remove entries."""
        return map_tensors(self._batch, lambda name, tensor: tensor)

    def fill(self, inputs: Inputs) -> None:
        """Copy in a batch with the same key."""
        self._packed.fill(inputs.list_arrays())
        for name, tensor in inputs.others.items():
            self._others[name].copy_(tensor, non_blocking=True)
        if self._rows is not None:
            self._rows.forget_packed()


def _describe(batch: Any, path: str, fills: Mapping[str, int], columns: int | None) -> Hashable:
    """Everything that Python code can see of a batch, except the values of its tensors."""
    if isinstance(batch, Tensor):
        shape = tuple(batch.shape)
        if columns is not None and path in fills:
            shape = (shape[0], columns)
        return shape, batch.dtype
    if isinstance(batch, Mapping):
        items = batch.items()
        return tuple((key, _describe(v, join(path, key), fills, columns)) for key, v in items)
    if isinstance(batch, (list, tuple)):
        return tuple(
            _describe(value, join(path, i), fills, columns) for i, value in enumerate(batch)
        )
    if isinstance(batch, _PLAIN):
        return batch
    raise NotRepeatableError(f"its batches hold {type(batch).__name__} objects")
