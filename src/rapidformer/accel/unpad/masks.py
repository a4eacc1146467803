"""Who attends to whom within the rows of an unpadded batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rapidformer.accel.unpad.rows import Rows
from rapidformer.errors import ModelError

MayAttend = Callable[[Any, Any, Any, Any], Any]
"""transformers' mask functions: (row, head, query's column, key's column) -> may it attend?"""

Window = tuple[int, int]
"""How many tokens before and after its own a query may attend to; -1: all of them."""
CAUSAL: Window = (-1, 0)
FULL: Window = (-1, -1)


@dataclass(frozen=True)
class Fused:
    """What compiled blocks read of a mask: of few different sizes, and nothing that is computed."""

    ends: Tensor
    longest: int
    key_ends: Tensor
    """Those of the rows that are attended to: as many as ``ends``."""
    longest_key: int
    window: Window
    largest_head: int
    """Of flash attention on this device; 0 if it has none."""

    @property
    def sizes(self) -> torch.Size:
        """What a compiled block may depend on."""
        return torch.Size((len(self.ends), self.longest, self.longest_key))


@dataclass(frozen=True)
class RowMask:
    """Takes the place of an attention mask: which rows there are, and who attends to whom in one.

    The model itself passes it to every block and from there to attention, so a block that is
    computed again in the backward pass has it too.
    """

    rows: Rows
    may_attend: MayAttend
    is_causal: bool
    is_full: bool
    keys: Rows | None = None
    """The rows of an encoder, for a decoder that attends to all their tokens."""
    fused: Fused | None = None
    """Given if blocks are compiled."""
    _masks: dict[int, Tensor] = field(default_factory=dict, compare=False)

    @property
    def key_rows(self) -> Rows:
        """Those that are attended to."""
        return self.rows if self.keys is None else self.keys

    def get_mask(self, row: int) -> Tensor | None:
        """Of one row, [length, length]; None if ``is_causal`` or ``is_full`` says it all."""
        if self.is_causal or self.is_full:
            return None
        if row not in self._masks:
            start = sum(self.rows.lengths[:row])
            columns = self.rows.columns[start : start + self.rows.lengths[row]]
            mask = _ask(self.may_attend, row, columns[:, None], columns[None])
            self._masks[row] = mask.expand(len(columns), len(columns))
        return self._masks[row]

    @cached_property
    def grid(self) -> Tensor:
        """Of all rows, laid out as ``Rows.to_grid`` does: [rows, 1, longest, longest]."""
        rows = self.rows
        is_real, is_key = (
            each.to_grid(torch.ones_like(each.columns)).bool() for each in (rows, self.key_rows)
        )
        allowed = is_key[:, None, :].expand(-1, rows.longest, -1)
        if not self.is_full:
            columns = rows.to_grid(rows.columns)
            number = torch.arange(len(columns), device=columns.device)[:, None, None]
            # The columns of padding are 0: what is said about them does not count.
            allowed = allowed & self.may_attend(
                number, number * 0, columns[:, :, None], columns[:, None, :]
            )
        # Queries that are padding attend to anything: a row of a softmax must not be empty.
        return (allowed | ~is_real[:, :, None])[:, None]

    @cached_property
    def window(self) -> Window | None:
        """The window that says it all, for kernels that take nothing else; None if none does."""
        if self.is_full or self.is_causal:
            return FULL if self.is_full else CAUSAL
        rows = self.rows
        size = rows.bound if rows.is_rounded else rows.longest
        return _find_window(self.may_attend, size) if rows.is_contiguous else None


def fuse(mask: RowMask) -> RowMask:
    """The same mask for compiled blocks."""
    if mask.window is None:
        raise ModelError("compiled blocks take full, causal and sliding masks only")
    rows, keys = mask.rows, mask.key_rows
    largest = get_largest_head(rows.ends.device)
    fused = Fused(rows.ends, rows.bound, keys.ends, keys.bound, mask.window, largest)
    return replace(mask, fused=fused)


@functools.cache
def get_largest_head(device: torch.device) -> int:
    """The largest head that flash attention takes on this device; 0 if it has none."""
    is_usable = device.type == "cuda" and torch.version.cuda is not None
    if not is_usable or not torch.backends.cuda.flash_sdp_enabled():
        return 0
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return 0
    # Its backward pass needs the shared memory of a data-center GPU for larger ones.
    return 256 if capability in ((8, 0), (9, 0), (10, 0)) else 128


def _ask(may_attend: MayAttend, row: int, query: Tensor, key: Tensor) -> Tensor:
    number = torch.zeros((), dtype=torch.long, device=key.device)
    answer: Tensor = may_attend(number + row, number, query, key)
    return answer


def _find_window(may_attend: MayAttend, size: int) -> Window | None:
    """The window of a sliding mask, read off its first and last query; None if it has none.

    Every query is asked for both edges of its window, and three for all keys: as sure as asking
    for all pairs, unless a mask has holes in the middle of most queries' windows.
    """
    columns = torch.arange(size)
    try:
        first, middle, last = (
            _ask(may_attend, 0, columns[query], columns).expand(size)
            for query in (0, size // 2, size - 1)
        )
        if last.device != columns.device:  # read off a tensor there, which has it on each row
            return None
        before, after = int(last.sum()) - 1, int(first.sum()) - 1
        edges = {offset: _ask_along(may_attend, columns, offset) for offset in (-before, after)}
        outside = [_ask_along(may_attend, columns, offset) for offset in (-before - 1, after + 1)]
    except RuntimeError:  # it reads tensors on another device, so it depends on more than columns
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


def _ask_along(may_attend: MayAttend, columns: Tensor, offset: int) -> Tensor:
    """Whether each query may attend to the key this far from it, where there is one."""
    keys = columns + offset
    exists = (keys >= 0) & (keys < len(columns))
    return _ask(may_attend, 0, columns[exists], keys[exists])
