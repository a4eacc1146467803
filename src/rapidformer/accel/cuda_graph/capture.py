"""Record what a function does on the device, and replay it without its Python code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Capture(Protocol):
    """How passes are recorded; tests have one without a GPU."""

    def warm_up(self, function: Callable[[], T], *, forbids_reads: bool) -> T:
        """Run the function as it will run while it is recorded.

        With ``forbids_reads``, fail if it waits for the device: a recording cannot.
        """

    def record(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record without executing. Returns the result and a function that fills it: the replay."""


class CudaCapture:
    """torch's CUDA graphs, which share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], T], *, forbids_reads: bool) -> T:
        """On the stream that records later: libraries set up their memory for each stream."""
        current = torch.cuda.current_stream(self._device)
        # Both ways, so memory of either stream can be used by the other without a mark.
        self._stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            if forbids_reads:
                torch.cuda.set_sync_debug_mode("error")
            with torch.cuda.stream(self._stream):
                return function()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(self._stream)

    def record(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread is watched: the loader's threads may allocate pinned memory.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = function()
        except BaseException:
            self._recover()
            raise
        return result, graph.replay

    def _recover(self) -> None:
        """Clean up after a failed capture: no random number can be drawn until one succeeds."""
        with suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        with suppress(RuntimeError):
            value = torch.zeros((), device=self._device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
                value.add_(1)
