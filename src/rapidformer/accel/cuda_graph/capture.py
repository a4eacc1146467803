"""Record what a function runs on the device, and replay it without running its Python code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

from rapidformer.compat.torch_tensors import stop_allocating

T = TypeVar("T")
_MOST_RESERVED = 0.5
"""If more of the device's memory is reserved than this, a recording might run out of it."""


class CudaCapture:
    """Records with torch's CUDA graphs, which share a pool of memory unless a recording fails."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Kept: torch still asks them which pinned memory is theirs."""

    @property
    def has_room(self) -> bool:
        """Whether there is plenty of memory for further recordings."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        return torch.cuda.memory_reserved(self._device) <= _MOST_RESERVED * total

    def warm_up(self, function: Callable[[], T], *, forbids_reads: bool) -> T:
        """Run the function as it will run while it is recorded.

        With ``forbids_reads``, fail if it waits for the device, which a recording must not do.
        """
        # On the stream that records later: libraries allocate workspaces per stream.
        current = torch.cuda.current_stream(self._device)
        # Each stream waits for the other, so memory may be used on both without record_stream().
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
        """Record without executing. Returns the result and the replay, which fills it."""
        graph = torch.cuda.CUDAGraph()
        try:
            with self._recording(graph):
                result = function()
        except BaseException:
            self._failed.append(graph)
            self._recover()
            raise
        return result, graph.replay

    def close(self) -> None:
        """Give the memory of recordings back to the device: those that nobody holds any more."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """As ``torch.cuda.graph``, but cached memory is released only if it may be needed.

        Releasing it every time would make the next steps allocate it again.
        """
        if not self.has_room:
            self.close()
        with torch.cuda.stream(self._stream):
            # Only calls of this thread can spoil it: loader threads may allocate pinned memory.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # it only repeats that something has failed
                    graph.capture_end()
                raise
            graph.capture_end()

    def _recover(self) -> None:
        """Leave torch as it was before a failed recording."""
        stop_allocating(self._device, self._pool)
        self._pool = torch.cuda.graph_pool_handle()  # torch may refuse the other one from now on
        # After a failed capture, random numbers need a successful one.
        with suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        with suppress(RuntimeError):
            value = torch.zeros((), device=self._device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
                value.add_(1)
