"""Who attends to whom within the rows of an unpadded batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rapidformer.accel.unpad.row_attention import LONGEST_ON_GPU, can_run_on_gpu
from rapidformer.accel.unpad.rows import Layout, Rows
from rapidformer.errors import ModelError

MayAttend = Callable[[Any, Any, Any, Any], Any]
"""transformers' mask functions: (row, head, query's column, key's column) -> may it attend?"""

Window = tuple[int, int]
"""How many tokens before and after its own a query may attend to; -1: all of them."""
CAUSAL: Window = (-1, 0)
FULL: Window = (-1, -1)


@dataclass(frozen=True)
class Fused:
    """The parts of a mask that fused kernels take; for compiled blocks, they have few sizes."""

    ends: Tensor
    longest: int
    key_ends: Tensor
    """The ends of the rows attended to: as many as ``ends``."""
    longest_key: int
    window: Window | None
    largest_head: int
    """The largest head size of flash attention on this device; 0 if it has none."""
    are_short: bool
    """Whether the kernel for short rows takes them, on this device."""

    @property
    def sizes(self) -> torch.Size:
        """What a compiled block may depend on; a window as well, so that blocks share a graph."""
        return torch.Size((len(self.ends), self.longest, self.longest_key, *(self.window or ())))


@dataclass(frozen=True)
class RowMask:
    """Replaces an attention mask: which rows there are, and who attends to whom within one."""

    rows: Rows
    may_attend: MayAttend
    is_causal: bool
    is_full: bool
    keys: Rows | None = None
    """The encoder's rows, if a decoder attends to them."""
    fused: Fused | None = None
    """Set if blocks are compiled."""
    _masks: dict[int, Tensor] = field(default_factory=dict, compare=False)

    @property
    def key_rows(self) -> Rows:
        """The rows attended to."""
        return self.rows if self.keys is None else self.keys

    def get_mask(self, row: int) -> Tensor | None:
        """The mask of one row, [length, length]; None if it is simply causal or full."""
        if self.is_causal or self.is_full:
            return None
        if row not in self._masks:
            start = sum(self.rows.lengths[:row])
            columns = self.rows.columns[start : start + self.rows.lengths[row]]
            number = self.rows.numbers[row]
            mask = _evaluate(self.may_attend, number, columns[:, None], columns[None])
            self._masks[row] = mask.expand(len(columns), len(columns))
        return self._masks[row]

    @cached_property
    def grid(self) -> Tensor:
        """The mask of all rows in ``Layout.of_lengths``: [rows, 1, longest, longest]."""
        queries, keys = map(Layout.of_lengths, (self.rows, self.key_rows))
        is_real, is_key = (
            each.pad(torch.ones_like(each.rows.columns)[None]).bool() for each in (queries, keys)
        )
        allowed = is_key[:, None, :].expand(-1, queries.grid[1], -1)
        if not self.is_full:
            columns, number = (
                queries.pad(self.rows.columns[None]), self.rows.numbers[:, None, None]
            )  # fmt: skip
            # Padding has column 0 here, so its answers are arbitrary: the other terms decide.
            allowed = allowed & self.may_attend(
                number, number * 0, columns[:, :, None], columns[:, None, :]
            )
        # Padding queries attend to anything: a softmax over no keys would be NaN.
        return (allowed | ~is_real[:, :, None])[:, None]

    @cached_property
    def layouts(self) -> tuple[Layout, Layout]:
        """Where queries and keys stand in the batch, without columns that no row reaches."""
        return Layout.of_filled(self.rows), Layout.of_filled(self.key_rows)

    @cached_property
    def in_batch(self) -> Tensor:
        """The mask of filled rows in these layouts, [rows, 1, queries, keys].

        It is computed on the device, without reading a length: a graph can replay it.
        """
        queries, keys = self.layouts
        end = self.key_rows.ends[keys.grid[0]]  # of all real tokens, which come first
        is_real = torch.arange(len(keys.places), device=end.device) < end
        allowed = keys.pad(is_real[None])[:, None, None]
        if self.is_full:
            return allowed
        assert self.window is not None
        before, after = self.window
        columns = torch.arange(keys.grid[1], device=end.device)
        distance = columns - columns[: queries.grid[1], None]
        if before >= 0:
            allowed = allowed & (distance >= -before)
        if after >= 0:
            allowed = allowed & (distance <= after)
        return allowed | (distance == 0)  # also padding: a softmax over no keys would be NaN

    @property
    def bias_shape(self) -> tuple[int, int]:
        """Queries and keys of a position bias that all rows share."""
        if self.rows.is_filled:
            queries, keys = self.layouts
            return queries.grid[1], keys.grid[1]
        parts = self.parts  # of compiled blocks, they do not depend on lengths
        return parts.longest, parts.longest_key

    @property
    def parts(self) -> Fused:
        """What fused kernels take."""
        if self.fused is not None:
            return self.fused
        rows, keys = self.rows, self.key_rows
        device = rows.places.device
        # One kernel for both sides: blocks are compiled again for another one.
        bound = max(rows.bound, keys.bound, rows.other_bound)
        return Fused(
            rows.ends, rows.longest, keys.ends, keys.longest, self.window, get_largest_head(device),
            are_short=bound <= LONGEST_ON_GPU and can_run_on_gpu(device),
        )  # fmt: skip

    @cached_property
    def window(self) -> Window | None:
        """The mask as a sliding window, for kernels that take only those, or None."""
        if self.is_full or self.is_causal:
            return FULL if self.is_full else CAUSAL
        rows = self.rows
        # Of rounded rows, no smaller: their blocks are compiled again for another window.
        size = max(rows.bound, 128) if rows.is_rounded else rows.longest
        return _find_window(self.may_attend, size) if rows.is_contiguous else None


def fuse(mask: RowMask) -> RowMask:
    """The same mask, with what compiled blocks need."""
    if mask.window is None:
        raise ModelError("compiled blocks take full, causal and sliding masks only")
    parts, rows, keys = mask.parts, mask.rows, mask.key_rows
    return replace(mask, fused=replace(parts, longest=rows.bound, longest_key=keys.bound))


@functools.cache
def get_largest_head(device: torch.device) -> int:
    """The largest head that flash attention takes on this device; 0 if it has none."""
    is_usable = device.type == "cuda" and torch.version.cuda is not None
    if not is_usable or not torch.backends.cuda.flash_sdp_enabled():
        return 0
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return 0
    # Above 128, its backward pass needs the shared memory of a data-center GPU.
    return 256 if capability in ((8, 0), (9, 0), (10, 0)) else 128


def _evaluate(may_attend: MayAttend, row: int | Tensor, query: Tensor, key: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.long, device=key.device)
    return may_attend(zero + row, zero, query, key)


def _find_window(may_attend: MayAttend, size: int) -> Window | None:
    """The window of a sliding mask, by the edges of all queries and the keys of three; or None."""
    columns = torch.arange(size)
    try:
        first, middle, last = (
            _evaluate(may_attend, 0, columns[query], columns).expand(size)
            for query in (0, size // 2, size - 1)
        )
        if last.device != columns.device:  # a tensor on the device decides, so rows may differ
            return None
        before, after = int(last.sum()) - 1, int(first.sum()) - 1
        edges = {
            offset: _evaluate_diagonal(may_attend, columns, offset) for offset in (-before, after)
        }
        outside = [
            _evaluate_diagonal(may_attend, columns, offset) for offset in (-before - 1, after + 1)
        ]
    except RuntimeError:  # it indexes a tensor on another device, so rows may differ
        return None
    distance = columns - size // 2
    is_sliding = (
        torch.equal(first, columns <= after)
        and torch.equal(middle, (distance >= -before) & (distance <= after))
        and torch.equal(last, columns >= size - 1 - before)
        and all(bool(allowed.all()) for allowed in edges.values())
        and not any(bool(allowed.any()) for allowed in outside)
    )
    if not is_sliding:
        return None
    return (-1 if before == size - 1 else before, -1 if after == size - 1 else after)


def _evaluate_diagonal(may_attend: MayAttend, columns: Tensor, offset: int) -> Tensor:
    """Whether each query may attend to the key at this distance, for those that have one."""
    keys = columns + offset
    exists = (keys >= 0) & (keys < len(columns))
    return _evaluate(may_attend, 0, columns[exists], keys[exists])
