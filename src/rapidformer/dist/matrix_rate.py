"""How fast this device multiplies matrices: measured, since data sheets promise more."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

_REPEATS = 5
_GPU_SIZES = (8192, 4096, 2048)
_CPU_SIZE = 512


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
    size = _CPU_SIZE
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Three matrices of the dtype, and one of fp32 while a random one is converted.
        fitting = (s for s in _GPU_SIZES if s * s * (3 * dtype.itemsize + 4) < free / 2)
        size = next(fitting, _GPU_SIZES[-1])
    with torch.no_grad():
        # A separate generator: dropout must draw the same numbers with and without this.
        generator = torch.Generator(device).manual_seed(0)
        left = torch.randn(size, size, device=device, generator=generator).to(dtype)
        right = torch.randn(size, size, device=device, generator=generator).to(dtype)
        product = torch.empty_like(left)

        def multiply() -> None:
            torch.mm(left, right, out=product)

        seconds = _time_on_gpu(multiply) if device.type == "cuda" else _time_on_host(multiply)
    if device.type == "cuda":
        del left, right, product
        # The product must not show up as the run's peak memory.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * size**3 / seconds


def _time_on_gpu(multiply: Callable[[], None]) -> float:
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


def _time_on_host(multiply: Callable[[], None]) -> float:
    multiply()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        multiply()
        times.append(time.perf_counter() - started)
    return min(times)
