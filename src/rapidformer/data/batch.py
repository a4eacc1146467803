"""What a batch holds: rows, labels and tokens, counted on the host; and how it moves."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from rapidformer.compat.torch_tensors import count_changes, get_storage_key, has_storage
from rapidformer.data.nested import iterate_tensors, map_tensors

IGNORED_LABEL = -100
# Not complex numbers: those may be conjugated lazily, which NumPy does not know.
_NUMPY_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64,
}  # fmt: skip
_HOST_COPY = "rapidformer_host_copy"
"""Set on tensors of whole numbers on a device, such as masks and labels."""


class BatchInfo(NamedTuple):
    """Counts of one micro-batch. Plain numbers: they cross process borders with the batch."""

    rows: int
    labels: int
    """Labels that a loss averages over: label tokens, or rows where a row has one label."""
    shifted_labels: int
    """The same for models that predict the next token: the first position has no prediction."""
    tokens: int
    """Tokens that are not padding; 0 if the batch has none, or does not show them."""
    slots: int
    """Tokens with padding."""

    def count_labels(self, *, shifts_labels: bool) -> int | None:
        """What the mean loss of the batch is taken over; None where nothing was counted."""
        if self.rows == 0:
            return None
        return self.shifted_labels if shifts_labels else self.labels

    def as_filler(self) -> BatchInfo:
        """The same batch when it only keeps a process in step with the others."""
        return BatchInfo(rows=0, labels=0, shifted_labels=0, tokens=0, slots=self.slots)


NO_BATCH = BatchInfo(rows=0, labels=0, shifted_labels=0, tokens=0, slots=0)


def describe_batch(batch: Any) -> BatchInfo:
    """Count what a collated batch holds; anything that is not a mapping counts rows only."""
    if not isinstance(batch, Mapping):
        rows = next((len(t) for t in iterate_tensors(batch) if t.dim()), 0)
        tokens = _count_ids(iterate_tensors(batch))
        return BatchInfo(rows=rows, labels=rows, shifted_labels=rows, tokens=tokens, slots=tokens)
    rows = count_rows(batch)
    labels, shifted = _count_labels(batch.get("labels"), rows)
    if isinstance(next_labels := batch.get("shift_labels"), torch.Tensor):
        labels = shifted = _count_labels(next_labels, rows)[0]  # a loss compares these as they are
    tokens, slots = _count_tokens(batch, rows)
    return BatchInfo(rows=rows, labels=labels, shifted_labels=shifted, tokens=tokens, slots=slots)


def count_rows(batch: Mapping[str, Any]) -> int:
    """The rows of a batch of named tensors."""
    return next((len(t) for t in batch.values() if isinstance(t, torch.Tensor) and t.dim()), 0)


def may_be_averaged_over_tokens(batch: Any) -> bool:
    """Whether a batch has token ids, but neither ``labels`` nor one value per row."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return False
    tensors = list(iterate_tensors(batch))
    return bool(_count_ids(tensors)) and all(tensor.dim() != 1 for tensor in tensors)


def move_to_device(batch: Any, device: torch.device) -> Any:
    """The batch on the device, of the same type; pinned memory is copied without waiting."""
    return batch if device.type == "cpu" else _change(batch, lambda tensor: _move(tensor, device))


def copy_batch(batch: Any, *, pins: bool) -> Any:
    """The batch in memory of its own, pinned if asked: a collate function may reuse its memory."""

    def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        # Pinning copies, unless the memory is pinned already.
        can_pin = pins and tensor.layout is torch.strided and not tensor.is_pinned()
        return tensor.pin_memory() if can_pin else tensor.clone()

    return _change(batch, copy_tensor)


def _change(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    # A subclass may know more than its entries, as BatchEncoding does (word_ids()). Any other
    # mapping becomes a dictionary: its copy might share its entries with the original.
    if isinstance(batch, (dict, UserDict)) and type(batch) is not dict:
        changed: Any = copy.copy(batch)
        if getattr(batch, "__dict__", None) is batch:  # entries are attributes, too
            changed.__dict__ = changed
        for name, value in batch.items():
            changed[name] = _change(value, change)
        return changed
    return map_tensors(batch, lambda _, tensor: change(tensor))


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    moved = tensor.to(device, non_blocking=True)
    is_kept = tensor.dim() == 2 and tensor.device.type == "cpu" and not tensor.is_floating_point()
    # Tensors made in inference mode do not count their changes.
    if is_kept and not moved.is_inference() and has_storage(moved):
        # A clone: a loader may fill the same memory with its next batch. If it does so through
        # NumPy, no version tells.
        state = tensor.clone(), count_changes(moved), get_storage_key(moved)
        setattr(moved, _HOST_COPY, state)
    return moved


def fits_numpy(tensor: torch.Tensor) -> bool:
    """Whether NumPy can hold the tensor without loss, without copying it."""
    is_known = type(tensor) is torch.Tensor and tensor.dtype in _NUMPY_DTYPES
    is_in_memory = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_known and is_in_memory and not tensor.requires_grad


def get_host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a batch in host memory; waits for the device only if it has changed since."""
    copy = find_host_copy(tensor)
    return tensor.cpu() if copy is None else copy


def find_host_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same without waiting; None if the values are on the device only."""
    if tensor.device.type == "cpu":
        return tensor
    host: tuple[torch.Tensor, int, int] | None = getattr(tensor, _HOST_COPY, None)
    # ``tensor.data = other`` does not count as a change, but has other memory. What is written
    # through ``tensor.data`` goes unnoticed: finding out would take a read from the device.
    if host is None or host[1] != count_changes(tensor) or host[2] != get_storage_key(tensor):
        return None
    return host[0]


def _count_labels(labels: Any, rows: int) -> tuple[int, int]:
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return rows, rows
    counted = labels != IGNORED_LABEL
    total = int(counted.sum())
    if labels.dim() < 2:
        return total, total
    return total, total - int(counted[..., 0].sum())


def _count_tokens(batch: Mapping[str, Any], rows: int) -> tuple[int, int]:
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if "input_values" in batch or "input_features" in batch:
        return 0, 0  # audio: its mask counts samples or frames, which are no tokens
    if isinstance(mask, torch.Tensor) and mask.dim() <= 3:
        return int(mask.sum()), mask.numel()
    if isinstance(ids, torch.Tensor):
        return ids.numel(), ids.numel()
    text, mask = batch.get("text"), batch.get("padding_mask")  # Megatron's names
    if isinstance(text, torch.Tensor) and text.dim() == 2:
        if isinstance(mask, torch.Tensor):
            return int(mask.sum()), mask.numel()
        # One more than the model sees: inputs and next tokens overlap.
        return text.numel() - rows, text.numel() - rows
    count = _count_ids(value for name, value in batch.items() if name != "labels")
    return count, count


def _count_ids(values: Iterable[Any]) -> int:
    """Of the first tensor that looks like token ids: whole numbers, [rows, tokens]."""
    for value in values:
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.shape[1] == 1:
            continue
        if not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool):
            return value.numel()
    return 0
