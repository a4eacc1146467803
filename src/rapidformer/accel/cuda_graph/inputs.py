"""Copy batches to fixed addresses, where a graph reads them at every replay.

A batch's key is everything that Python code can see of it except the values of its tensors, and
there is a graph for each key. To keep keys few, a batch that runs unpadded is first padded to one
of a few widths, and so is one of a model that keeps its padding, if that changes nothing: to those
that the largest batch of the update needs, on any rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from rapidformer.accel.attention.kernel_scope import MULTIPLE
from rapidformer.accel.cuda_graph.block_calls import shifting
from rapidformer.accel.cuda_graph.columns import (
    Columns,
    choose_columns,
    choose_sides,
    find_filling,
    pad,
    pad_array,
)
from rapidformer.accel.unpad.batches import (
    LEAST_PADDING,
    FixedRows,
    count_labels,
    find_rows,
    fix_rows,
    is_on,
    is_removable,
)
from rapidformer.accel.unpad.origin import Mask
from rapidformer.accel.unpad.promises import reads_no_padding
from rapidformer.accel.unpad.rows import NO_SIZES, Rows, Sides, Sizes
from rapidformer.accel.unpad.sides import (
    MASKS,
    is_encoder_decoder,
    read_filled_sides,
    read_masks,
)
from rapidformer.data.batch import find_host_copy, fits_numpy, get_host_copy
from rapidformer.data.nested import iterate_tensors, join, map_tensors
from rapidformer.errors import RapidformerError

Array = NDArray[Any]
_ALIGNMENT = 256
"""In bytes: kernels are compiled for aligned inputs."""
_LARGE = 2**20
"""In bytes: what is larger is not joined with other tensors."""
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
    """Tensors that are only on the device, large, or of a dtype that NumPy does not have."""
    columns: Columns
    """What its tensors were padded to; none if they keep their widths."""
    fixed: FixedRows | None
    key: Hashable
    trained: ClassVar[Sequence[Tensor]] = ()
    """Those of its tensors that need a gradient."""

    @property
    def is_rounded(self) -> bool:
        """Whether its width was rounded up to one of a few."""
        return bool(self.columns)

    @property
    def is_changed(self) -> bool:
        """Whether it runs with other sizes than its batch would by itself."""
        return self.is_rounded or self.rows is not None

    @property
    def rows(self) -> Rows | Sides | None:
        return self.fixed.rows if self.fixed is not None else None

    @property
    def each(self) -> tuple[Rows, ...]:
        """Its rows, of both sides if there are two; none if it runs padded."""
        return self.rows.each if self.rows is not None else ()

    @property
    def num_tokens(self) -> int:
        """How many tokens the model computes on; 0 if that is not known."""
        return sum(len(rows.places) for rows in self.each)

    @property
    def sizes(self) -> Sizes:
        """What it was rounded up to."""
        names = ("attention_mask", "labels")
        columns, labels = (self.columns[n].width if n in self.columns else 0 for n in names)
        return Sizes(columns, labels, *(size for rows in self.each for size in rows.rounded))

    def list_arrays(self) -> list[Array]:
        """All values in host memory: those of the batch, then those of its rows."""
        of_rows = (tensor.numpy() for rows in self.each for tensor in rows.tensors)
        return [*self.arrays.values(), *of_rows]


def read_inputs(
    model: nn.Module,
    batch: Any,
    *,
    least: Sizes = NO_SIZES,
    sizes_up: int = 0,
    widens: bool = True,
) -> Inputs | None:
    """Prepare a batch, from host memory only; None if it must run as it is.

    That is the case if the model removes padding that a graph would keep: with dropout, that
    changes the results.
    It is rounded up to ``least``, and its tokens, with ``sizes_up``, to a later size than that.
    Without ``widens``, the batch keeps its width.
    """
    padding = _read_padding(model, batch, least, sizes_up, widens=widens)
    if padding is None:
        return None
    columns, fixed = padding
    arrays, others = _read_values(batch, columns)
    rows = None if fixed is None else fixed.rows
    sizes = None if rows is None else tuple(each.sizes for each in rows.each)
    is_full = fixed is not None and fixed.is_full
    labelled = None if fixed is None else fixed.labelled
    key = (_describe(batch, "", columns), tuple(arrays), sizes, is_full, labelled)
    return Inputs(batch, arrays, others, columns, fixed, key)


def find_columns(
    model: nn.Module,
    batch: Any,
    *,
    factor: float = 1.0,
    least: Sizes = NO_SIZES,
    is_padded: bool = True,
) -> Columns:
    """The columns that a batch may get, as far as is known without its loss.

    ``is_padded``: both sides of an encoder-decoder model compute on their padding.
    """
    filling = find_filling(model)
    is_two_sided = is_encoder_decoder(model)
    fills = not is_padded if is_two_sided else is_on(model)
    if not (filling.fills if fills else filling.widens):
        return {}
    if any(value.is_floating_point() for value in iterate_tensors(batch)):
        return {}  # a weight that is 0 today may hide what the loss reads tomorrow
    if is_two_sided:
        return choose_sides(model, batch, factor=factor, least=least, is_padded=is_padded)
    mask = batch["attention_mask"]
    return choose_columns(model, batch, mask, factor=factor, least=least)


def _read_padding(
    model: nn.Module, batch: Any, least: Sizes, sizes_up: int, *, widens: bool
) -> tuple[Columns, FixedRows | None] | None:
    """The columns that a batch gets, and what the model would read off its mask, if it has one."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return {}, None
    if not isinstance(labels, Tensor) and not reads_no_padding():
        return {}, None
    is_real = get_host_copy(mask).bool().numpy()
    if is_encoder_decoder(model):
        found = None if sizes_up else _read_sides(model, batch, is_real, least, widens=widens)
    else:
        found = _read_rows(model, batch, is_real, least, sizes_up, widens=widens)
    if found is None or found[0] or found[1].rows is not None:
        return found
    is_removed = is_on(model) and find_rows(model, batch) is not None
    return None if is_removed else found


def _read_rows(
    model: nn.Module, batch: Any, is_real: Mask, least: Sizes, sizes_up: int, *, widens: bool
) -> tuple[Columns, FixedRows]:
    widens = widens and not _has_fixed_length(is_real)
    columns = find_columns(model, batch, least=least) if widens else {}
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.shape == is_real.shape:
        labels = pad(get_host_copy(labels), columns.get("labels"))
    is_wide = pad_array(is_real, columns.get("attention_mask"))
    fixed = read_fixed_rows(model, is_wide, labels, sizes_up, least if widens else NO_SIZES)
    if fixed.rows is None and is_on(model):
        # The padding stays, and more of it could change the loss.
        return {}, FixedRows(None, is_full=bool(is_real.all()))
    return columns, fixed


def _read_sides(
    model: nn.Module, batch: Any, is_real: Mask, least: Sizes, *, widens: bool
) -> tuple[Columns, FixedRows]:
    """Without padding if both sides can be; a loss for which they may not get wider reads it."""
    if widens and _may_fill(model) and read_masks(batch, LEAST_PADDING) is not None:
        columns = find_columns(model, batch, least=least, is_padded=False)
        masks = {name: batch[name] for name in MASKS if isinstance(batch.get(name), Tensor)}
        wide = {n: pad(get_host_copy(mask), columns.get(n)) for n, mask in masks.items()}
        sides = read_filled_sides(wide, least)
        if sides is not None:
            return columns, FixedRows(sides)
    columns = find_columns(model, batch, least=least) if widens else {}
    is_wide = pad_array(is_real, columns.get("attention_mask"))
    return columns, FixedRows(None, is_full=bool(is_wide.all()))


def read_fixed_rows(
    model: Any, is_real: Mask, labels: Tensor | None, sizes_up: int = 0, least: Sizes = NO_SIZES
) -> FixedRows:
    """What ``find_rows`` must return for replays of this size; ``sizes_up`` picks a later one."""
    if _may_fill(model) and is_removable(model, is_real, labels):
        rows = Rows.read_filled(is_real, sizes_up, least)
        if rows.is_contiguous:
            return FixedRows(rows, labelled=_halve(model, rows, labels))
    return FixedRows(None, is_full=bool(is_real.all()))


def _may_fill(model: Any) -> bool:
    return is_on(model) and find_filling(model).fills


def _halve(model: Any, rows: Rows, labels: Tensor | None) -> int | None:
    """Half of the tokens, if no more have a label: with answers only, a head computes half as much.

    Any other fraction would be another graph.
    """
    half = len(rows.places) // 2
    if labels is None or labels.shape != rows.shape:
        return None
    return half if count_labels(model, labels) <= half else None


def _has_fixed_length(is_real: Mask) -> bool:
    """Whether rows seem to be cut or packed to one length: then there are no others to cover."""
    rows, width = is_real.shape
    return rows > 1 and width % MULTIPLE == 0 and bool(is_real.all())


def _read_values(batch: Any, columns: Columns) -> tuple[dict[str, Array], dict[str, Tensor]]:
    """A batch's tensors by path: those in host memory as arrays, and all others."""
    arrays: dict[str, Array] = {}
    others: dict[str, Tensor] = {}

    def read(name: str, tensor: Tensor) -> Tensor:
        found = find_host_copy(tensor)
        if found is not None and fits_numpy(found) and not _is_copied_alone(found):
            arrays[name] = pad_array(found.numpy(), columns.get(name))
        else:
            others[name] = pad(tensor, columns.get(name))
        return tensor

    map_tensors(batch, read)
    return arrays, others


def _is_copied_alone(tensor: Tensor) -> bool:
    """Whether a tensor goes to the device from where it is: joining images takes milliseconds."""
    return tensor.is_floating_point() and tensor.nbytes >= _LARGE and tensor.is_pinned()


class PackedTensors:
    """Tensors next to each other on the device: one copy from the host fills them all."""

    def __init__(self, arrays: Sequence[Array], device: torch.device) -> None:
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._memory = torch.empty(self._starts[-1], dtype=torch.uint8, device=device)
        self.tensors = [
            _view(self._memory[start : start + array.nbytes], array)
            for start, array in zip(self._starts, arrays, strict=False)
        ]
        self.fill(arrays)

    def fill(self, arrays: Sequence[Array]) -> None:
        """Copy in arrays with the same shapes and types; does not wait for the device."""
        is_pinned = self._memory.device.type == "cuda"
        host = torch.empty_like(self._memory, device="cpu", pin_memory=is_pinned)
        memory = host.numpy()
        for start, array in zip(self._starts, arrays, strict=False):
            place = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            place[...] = array
        # torch does not reuse this pinned memory until the copy is done.
        self._memory.copy_(host, non_blocking=True)


class StaticInputs:
    """A batch whose tensors keep their addresses."""

    trained: Sequence[Tensor] = ()

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self.device = device
        self._packed = PackedTensors(inputs.list_arrays(), device)
        self._others = {name: t.to(device, copy=True) for name, t in inputs.others.items()}
        tensors = {**dict(zip(inputs.arrays, self._packed.tensors, strict=False)), **self._others}
        self._batch = map_tensors(inputs.batch, lambda name, tensor: tensors[name])
        others = (name for name, t in tensors.items() if name != "attention_mask" and t.dim())
        names = [name for name in ("input_ids", *others) if name in tensors]
        self._values = [tensors[name] for name in names[:1]]
        """A tensor that any values of its own kind may stand in: the tokens, as a rule."""
        rows = inputs.rows
        self._rows = None
        if rows is not None:
            self._rows = rows.fix(*self._packed.tensors[len(inputs.arrays) :])
        if inputs.fixed is not None:
            fix_rows(self._batch["attention_mask"], inputs.fixed._replace(rows=self._rows))

    @property
    def batch(self) -> Any:
        """A copy of the containers, since a forward step may add and remove entries."""
        return map_tensors(self._batch, lambda name, tensor: tensor)

    def shifted(self) -> AbstractContextManager[None]:
        """Inside, it is another batch: each row has the tokens of the one before it."""
        return shifting(self._values, lambda x: x.roll(1, 0) if len(x) > 1 else x.flip(-1))

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch as a model's arguments."""
        return (), self.batch

    def read(self, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of another batch, to run it without a graph."""
        return StaticInputs(inputs, self.device).arguments

    def fill(self, inputs: Inputs) -> None:
        """Copy in a batch with the same key."""
        self._packed.fill(inputs.list_arrays())
        for name, tensor in inputs.others.items():
            self._others[name].copy_(tensor, non_blocking=True)
        for rows in self._rows.each if self._rows is not None else ():
            rows.packed.clear()  # arguments of an earlier batch


def _describe(batch: Any, path: str, columns: Columns) -> Hashable:
    """Everything that Python code can see of a batch, except the values of its tensors."""
    if isinstance(batch, Tensor):
        shape = tuple(batch.shape)
        if path in columns:
            shape = (shape[0], columns[path].width)
        return shape, batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, _describe(v, join(path, key), columns)) for key, v in batch.items())
    if isinstance(batch, (list, tuple)):
        return tuple(_describe(value, join(path, i), columns) for i, value in enumerate(batch))
    if isinstance(batch, _PLAIN):
        return batch
    raise NotRepeatableError(f"its batches hold {type(batch).__name__} objects")


def _view(memory: Tensor, array: Array) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    # By DLPack, as if its memory began here. Views share a version counter, so that changing one
    # would invalidate the others, which autograd may have saved; and for another place in its
    # storage, a block would be compiled again.
    return from_dlpack(memory.view(dtype).view(array.shape))
