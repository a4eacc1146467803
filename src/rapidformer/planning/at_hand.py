"""How long a block takes on the GPU at hand: both passes, on random values of the followed shapes.

The GPU waits until the host has queued a whole step, so that only kernels count: what it takes to
launch them is predicted apart.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rapidformer.compat.torch_dispatch import tree_map_only
from rapidformer.compat.torch_tensors import keep_gpu_waiting
from rapidformer.models.recording import list_tensors

Step = Callable[[], object]
_WARM, _STEPS = 3, 7


def time_on_gpu(step: Step) -> float:
    """Seconds that the kernels of a step take."""
    longest = 0.0
    times: list[float] = []
    for _ in range(_WARM):  # libraries choose their kernels, and clocks rise
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        longest = time.perf_counter() - began
    for _ in range(_STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        keep_gpu_waiting(longest)
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


class BlockTimer:
    """Times blocks in the run's precision."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        measure: Callable[[Step], float] = time_on_gpu,
    ) -> None:
        self._device, self._dtype, self._measure = device, dtype, measure
        self.problem: str | None = None
        """Why a block could not be timed."""

    def __call__(self, block: nn.Module, args: Any, kwargs: Any) -> float | None:
        """Seconds of both passes of a block without values, called like this; None if it fails."""
        try:
            return None if self.problem else self._measure(self._build_step(block, args, kwargs))
        except Exception as error:  # no memory, a kernel that is missing: the table will do
            self.problem = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            return None
        finally:
            gc.collect()
            with suppress(RuntimeError):  # after some errors the GPU answers no more
                torch.cuda.empty_cache()

    def _build_step(self, block: nn.Module, args: Any, kwargs: Any) -> Step:
        weights = {
            name: self._fill(tensor)
            for name, tensor in chain(block.named_parameters(), block.named_buffers())
        }
        inputs: Any = tree_map_only(Tensor, self._fill, (args, kwargs))
        trained = [t for t in list_tensors((weights, inputs)) if t.requires_grad]

        def step() -> None:
            with torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not None):
                outputs = functional_call(block, weights, *inputs)
            hidden = next(t for t in list_tensors(outputs) if t.requires_grad)
            torch.autograd.grad(hidden, trained, torch.ones_like(hidden), allow_unused=True)

        return step

    def _fill(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:  # ids and masks have their values
            return tensor.detach().to(self._device)
        filled = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
        if tensor.is_floating_point():
            filled.normal_(std=0.02)
        return filled.requires_grad_(tensor.requires_grad)
