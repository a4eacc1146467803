"""What a replay must have in common with what it replaces: the same bits, but for sums.

If kernels are deterministic, a replay must have the same bits; otherwise sums may be in another
order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rapidformer.accel.cuda_graph.inputs import NotRepeatableError

_ROUNDING, _ROUNDING_16_BIT = 2.0**-17, 2.0**-9
"""What a sum in another order may change, relative, unless kernels are deterministic."""
_MARGIN = 4
"""How many times the difference of two runs that of a replay may be."""
_LEAST = 0.01
"""A gradient is compared relative to its largest number, or to this part of the largest of all: one
that is zero in theory, such as that of the key bias, is nothing but noise."""


def get_limit(*, is_16_bit: bool, spread: float = 0.0) -> float:
    """How far a replay may differ, relative; ``spread`` is how far two runs differ."""
    if torch.are_deterministic_algorithms_enabled() and not spread:
        return 0.0
    return _MARGIN * max(spread, _ROUNDING_16_BIT if is_16_bit else _ROUNDING)


def check_replay(
    mine: Sequence[Tensor | None], theirs: Sequence[Tensor | None], what: str, *, is_16_bit: bool
) -> None:
    """Refuse a replay that differs from what it replaces; waits for the device."""
    difference = max(measure_differences(mine, theirs), default=0.0)
    if not difference <= get_limit(is_16_bit=is_16_bit):
        raise NotRepeatableError(
            f"a replay gave other {what} than running it (by {difference:.1e}, relative)"
        )


def are_close(mine: float, theirs: float, limit: float, *, least: float = 0.0) -> bool:
    """Whether two numbers differ by no more than that, relative, or ``least``, or are both NaN."""
    is_close = math.isclose(mine, theirs, rel_tol=limit, abs_tol=least)
    return is_close or (math.isnan(mine) and math.isnan(theirs))


def measure_differences(
    mine: Sequence[Tensor | None] | None, theirs: Sequence[Tensor | None] | None
) -> list[float]:
    """How far each gradient differs, relative; 0.0 if all bits agree. Waits for the device."""
    pairs = list(zip(mine or (), theirs or (), strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return [math.inf]
    held = [(a.detach(), b.detach()) for a, b in pairs if a is not None and b is not None]
    if not held:
        return []
    largest = torch.stack([b.abs().amax().double() for _, b in held]).nan_to_num()
    scales = torch.maximum(largest, _LEAST * largest.max()).clamp(min=1e-30)
    distances = torch.stack([_get_distance(a, b).double() for a, b in held])
    differences: list[float] = (distances / scales).nan_to_num(nan=math.inf).tolist()
    return differences


def _get_distance(mine: Tensor, theirs: Tensor) -> Tensor:
    is_same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    return torch.where(is_same, 0.0, mine - theirs).abs().amax()
