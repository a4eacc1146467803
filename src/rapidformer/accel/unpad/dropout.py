"""Dropout on a CPU by 16 random bits for each element: a third of the time of torch's own.

Only where padding is removed: other numbers are drawn there than for a padded batch anyway. So a
run that keeps its padding draws what a plain PyTorch loop does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.unpad.rows import Rows
from rapidformer.compat.patches import Entry, Patch

_ALL = 1 << 16
"""The rate is rounded to a multiple of 1/65,536."""


def drop(tensor: Tensor, rate: float) -> Tensor:
    """Dropout in training."""
    # A product, as in torch: a dropped NaN must stay one, so that a broken step is noticed.
    return tensor * draw_factors(tensor, rate)


def draw_factors(like: Tensor, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """What dropout multiplies by."""
    is_kept = draw_kept(like.numel(), rate, generator).view(like.shape)
    return is_kept.to(like.dtype).mul_(get_factor(rate))


def draw_kept(count: int, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """Which of so many are kept; without a generator, from torch's, as resuming expects."""
    words = torch.empty((count + 3) // 4, dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:count] >= _count_dropped(rate) - _ALL // 2


def get_factor(rate: float) -> float:
    """What dropout multiplies those by that are kept."""
    return _ALL / (_ALL - _count_dropped(rate))


def _count_dropped(rate: float) -> int:
    return min(round(rate * _ALL), _ALL - 1)


def use_bits(rows: Rows | None) -> AbstractContextManager[None]:
    """Inside a block's forward pass on these rows, ``functional.dropout`` is ``drop``."""
    # Compiled blocks, whose rows are rounded, draw numbers of their own.
    is_plain = rows is not None and rows.places.device.type == "cpu" and not rows.is_rounded
    return BITS if is_plain else nullcontext()


def _build_dropout(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        # A part of a block may be compiled by its author.
        may_change = not torch.compiler.is_compiling() and BITS.is_inside()
        is_usual: Any = training and not inplace and type(input) is Tensor and 0 < p < 1
        if may_change and is_usual and input.is_floating_point():
            return drop(input, p)
        return plain(input, p, training, inplace)

    return dropout


BITS = Patch(lambda: [Entry(functional, "dropout", _build_dropout)])
