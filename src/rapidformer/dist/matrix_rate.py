"""How fast this device multiplies matrices: measured, since data sheets promise more."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

_REPEATS = 5
_GPU_SIZES = (8192, 4096, 2048)
_CPU_SIZES = (512, 64)
_LONG = 1e-3
"""Seconds that only a type which torch emulates takes for the small product on a CPU."""


def measure_rank_rate(
    device: torch.device, dtype: torch.dtype | None, world_size: int
) -> float | None:
    """The rate of a rank's device in its precision; None if ranks share a CPU's cores."""
    if device.type == "cpu" and world_size > 1:
        return None
    return measure_matrix_rate(device, dtype or torch.float32)


@functools.cache
def measure_matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large square product; measured once."""
    if device.type == "cpu":
        large, size = _CPU_SIZES
        seconds = _time_on_host(_build_product(size, device, dtype))
        if seconds < _LONG:
            size, seconds = large, _time_on_host(_build_product(large, device, dtype))
    else:
        free, _ = torch.cuda.mem_get_info(device)
        # Three matrices of the dtype, and one of fp32 while a random one is converted.
        fitting = (s for s in _GPU_SIZES if s * s * (3 * dtype.itemsize + 4) < free / 2)
        size = next(fitting, _GPU_SIZES[-1])
        seconds = _time_on_gpu(_build_product(size, device, dtype))
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


def _time_on_gpu(multiply: Callable[[], object]) -> float:
    """The fastest of a few bursts: clocks take a while to rise."""
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


def _time_on_host(multiply: Callable[[], object]) -> float:
    multiply()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        multiply()
        times.append(time.perf_counter() - started)
    return min(times)
