"""Record what a function does on the device, and replay it without its Python code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
_MOST_RESERVED = 0.5
"""Fraction of the device's memory above which a recording might not find enough."""


class Capture(Protocol):
    """How passes are recorded; tests have one without a GPU."""

    @property
    def has_room(self) -> bool:
        """Whether there is plenty of memory for more recordings."""

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

    @property
    def has_room(self) -> bool:
        total = torch.cuda.get_device_properties(self._device).total_memory
        return torch.cuda.memory_reserved(self._device) <= _MOST_RESERVED * total

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
            with self._recording(graph):
                result = function()
        except BaseException:
            self._recover()
            raise
        return result, graph.replay

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """As ``torch.cuda.graph`` does, but memory is given back only if it may be needed.

        Otherwise the steps that follow would have to allocate it again.
        """
        if not self.has_room:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            # Only this thread is watched: the loader's threads may allocate pinned memory.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()

    def _recover(self) -> None:
        """Clean up after a failed capture: no random number can be drawn until one succeeds."""
        with suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        with suppress(RuntimeError):
            value = torch.zeros((), device=self._device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
                value.add_(1)
