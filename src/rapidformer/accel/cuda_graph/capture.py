"""Record CUDA graphs with torch, and say why something could not be recorded."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch

from rapidformer.accel.cuda_graph.host_constants import HostConstants
from rapidformer.compat.torch_tensors import stop_allocating
from rapidformer.errors import RapidformerError

T = TypeVar("T")
_MOST_RESERVED, _MOST_USED = 0.5, 0.75
"""If this run has reserved more of the device's memory than this, or all that share the device
use more, a recording might run out of it."""


class CudaCapture:
    """Records with torch's CUDA graphs, which share a pool of memory unless a recording fails.

    A pool ends with its last graph, and torch refuses to record into it again.
    """

    def __init__(
        self, device: torch.device, *, is_16_bit: bool = False, compiles: bool = False
    ) -> None:
        self.device, self.is_16_bit, self.compiles = device, is_16_bit, compiles
        """``is_16_bit``: what is recorded rounds to 16 bits; ``compiles``: parts are compiled."""
        self._constants = HostConstants(device)
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        """Those that use the pool."""
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Kept: torch still asks them which pinned memory is theirs."""

    def split(self) -> CudaCapture:
        """Another one, whose recordings may be replayed in between those of this one."""
        return CudaCapture(self.device, is_16_bit=self.is_16_bit, compiles=self.compiles)

    @property
    def has_room(self) -> bool:
        """Whether there is plenty of memory for further recordings."""
        free, total = torch.cuda.mem_get_info(self.device)  # other processes may use it as well
        allowed = torch.cuda.get_per_process_memory_fraction(self._stream.device) * total
        reserved = torch.cuda.memory_reserved(self.device)
        return reserved <= _MOST_RESERVED * allowed and total - free <= _MOST_USED * total

    def warm_up(self, function: Callable[[], T], *, forbids_reads: bool) -> T:
        """Run the function as it will be recorded; with ``forbids_reads``, it may not wait."""
        # On the stream that records later: libraries allocate workspaces per stream.
        current = torch.cuda.current_stream(self.device)
        # Each stream waits for the other, so memory may be used on both without record_stream().
        self._stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            if forbids_reads:
                torch.cuda.set_sync_debug_mode("error")
            with torch.cuda.stream(self._stream), self._constants:
                return function()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(self._stream)

    def record(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record without executing. Returns the result and the replay, which fills it."""
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with self._recording(graph), self._constants:
                result = function()
        except BaseException:
            self._failed.append(graph)
            self._recover()
            graph.reset()  # or its memory would be lost to the passes that run instead
            raise
        self._graphs.add(graph)
        return result, graph.replay

    def close(self) -> None:
        """Give the memory of recordings back to the device: those that nobody holds any more."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """As ``torch.cuda.graph``, but cached memory is released only if it may be needed."""
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
        stop_allocating(self.device, self._pool)
        self._pool = torch.cuda.graph_pool_handle()  # torch may refuse the other one from now on
        self._graphs.clear()
        # After a failed capture, random numbers need a successful one.
        with suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
        with suppress(RuntimeError):
            value = torch.zeros((), device=self.device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
                value.add_(1)


def describe_error(error: Exception) -> str:
    """Why something could not be recorded, on one line."""
    if isinstance(error, RapidformerError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    # Below a TorchScript function, torch puts the reason after a traceback.
    text = next((line for line in lines if line.startswith("RuntimeError: ")), lines[0])
    if "synchronizing CUDA operation" in text:
        return f"a step waits for the GPU, as .item() does{_find_place(error)}"
    if "legacy stream" in text:
        return "a loss or an output of an earlier step is kept with its graph: keep loss.detach()"
    return f"{type(error).__name__}: {text.removeprefix('RuntimeError: ')}"


def _find_place(error: Exception) -> str:
    """The innermost line that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = tuple(
        str(Path(file).parents[depth]) for file, depth in ((torch.__file__, 0), (__file__, 2))
    )
    lines = (
        f" ({Path(f.filename).name}:{f.lineno})"
        for f in reversed(frames)
        if not f.filename.startswith(own)
    )
    return next(lines, "")
