"""How fast a GPU multiplies matrices: measured, since data sheets promise more."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

_REPEATS = 5
_SIZES = (8192, 4096, 2048)


def measure_rank_rate(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """The rate of a rank's GPU in its precision; None for a CPU, whose cores do other work, too."""
    return None if device.type == "cpu" else measure_matrix_rate(device, dtype or torch.float32)


@functools.cache
def measure_matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large square product; measured once."""
    free, _ = torch.cuda.mem_get_info(device)
    # Three matrices of the dtype, and one of fp32 while a random one is converted.
    fitting = (size for size in _SIZES if size * size * (3 * dtype.itemsize + 4) < free / 2)
    size = next(fitting, _SIZES[-1])
    seconds = _find_shortest(_build_product(size, device, dtype))
    # The product must not show up as the run's peak memory.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return 2 * size**3 / seconds


def _build_product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    # A separate generator: dropout must draw the same numbers with and without this.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    return functools.partial(torch.mm, left, right, out=torch.empty_like(left))


def _find_shortest(multiply: Callable[[], object]) -> float:
    """Its seconds in the fastest of a few bursts: clocks take a while to rise."""
    times: list[float] = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_REPEATS):
            multiply()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / _REPEATS)
    return min(times)
