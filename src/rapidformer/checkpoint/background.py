"""Write a checkpoint behind training: the run waits only while its state is copied.

A thread with its own gloo group does the writing. torch's process-based saving would start the
user's script a second time (``spawn`` imports it), needs the whole state in ``/dev/shm``, and
leaves a writer behind when its trainer is killed, which could publish into a folder that has
another owner by then. The thread seldom holds the interpreter's lock: copying, hashing and writing
release it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rapidformer.checkpoint.index import Sizes
from rapidformer.checkpoint.pieces import Piece
from rapidformer.checkpoint.saving import Save
from rapidformer.dist.collectives import gather_from_all, is_alone
from rapidformer.host_memory import measure_free_memory

SMALLEST_BYTES = 64 * 2**20
"""``--async-save auto`` writes smaller states at once: that takes a moment anyway."""
_LEAST_LOCKED = 2**25
"""Bytes: from here on, the C library always gives a block pages of its own."""
_FOR_ALL_GPUS = 1
"""CUDA's flag ``cudaHostRegisterPortable``."""
_LARGEST_PART = 0.5
"""Of the free host memory, for copies: data loaders and the page cache need some, too."""
# A slow disk is not a failure, and gloo notices by itself when another rank dies.
_PATIENCE = timedelta(days=1)


class BackgroundSave:
    """At most one save, from its start until its result is taken."""

    def __init__(self) -> None:
        self.save: Save | None = None
        """The save whose result was not taken yet; the same on every rank."""
        self._copies = _HostCopies()
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_room: bool | None = None

    def reserve(self, pieces: list[Piece]) -> None:
        """Allocate the memory for copies of GPU tensors ahead of the first save."""
        self._copies.reserve(pieces)

    def has_room(self, pieces: list[Piece]) -> bool:
        """Whether host memory has room for copies of the state; found out once, by every rank."""
        if self._has_room is None:
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            needed = sum(piece.data.nbytes for piece in pieces) * ranks_here
            is_enough = needed < measure_free_memory() * _LARGEST_PART
            self._has_room = all(gather_from_all(is_enough))
        return self._has_room

    @property
    def is_done(self) -> bool:
        """Whether ``finish`` would return at once on this rank."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, save: Save) -> None:
        """Copy the state, then write it in the background; every rank must call this."""
        assert self.save is None, "one save at a time"
        if self._group is None and not is_alone():
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        save.pieces = self._copies.copy(save.pieces)
        self.save, self._error = save, None
        save.is_behind = True
        # Not a daemon: Python waits for it at exit, so that the last save is complete.
        self._thread = threading.Thread(target=self._write, args=(save,), name="rapidformer-save")
        self._thread.start()

    def join(self) -> None:
        """Wait for the save, but leave it to ``finish``, which every rank calls."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> Save | None:
        """Wait for the save and return it; raises what went wrong. None if there is none."""
        save, thread = self.save, self._thread
        if save is None or thread is None:
            return None
        thread.join()
        self.save = self._thread = None
        save.pieces = []
        error, self._error = self._error, None
        if error is not None:
            raise error
        return save

    def cancel(self) -> None:
        """Let the save fail soon; earlier checkpoints stay."""
        if self.save is not None:
            self.save.is_cancelled.set()

    def _write(self, save: Save) -> None:
        try:
            save.write(self._group)
        except BaseException as error:  # raised by `finish`, in the main thread
            self._error = error


class _HostCopies:
    """Copies in host memory; those of GPU tensors are page-locked, and kept for the next save."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Sizes], torch.Tensor] = {}
        self._reserving: threading.Thread | None = None

    def reserve(self, pieces: Iterable[Piece]) -> None:
        """Allocate the memory for these while training continues."""
        wanted = {
            (piece.name, piece.offsets): (piece.data.shape, piece.data.dtype)
            for piece in pieces
            if piece.data.is_cuda
        }
        device = torch.cuda.current_device()

        def allocate() -> None:
            torch.cuda.set_device(device)  # a thread starts on the first GPU
            with suppress(RuntimeError, MemoryError):  # the save meets it again, and can say so
                for key, (shape, dtype) in wanted.items():
                    self._kept[key] = _allocate(shape, dtype)

        # A daemon: a run that ends before its first save does not wait for memory.
        self._reserving = threading.Thread(target=allocate, name="rapidformer-reserve", daemon=True)
        self._reserving.start()

    def copy(self, pieces: Iterable[Piece]) -> list[Piece]:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        before, self._kept = self._kept, {}
        copies, devices = [], set()
        for piece in pieces:
            if not piece.data.is_cuda:
                copies.append(replace(piece, data=piece.data.detach().clone()))
                continue
            key, data = (piece.name, piece.offsets), piece.data
            kept = before.pop(key, None)
            if kept is None or (kept.shape, kept.dtype) != (data.shape, data.dtype):
                kept = _allocate(data.shape, data.dtype)
            kept.copy_(data.detach(), non_blocking=True)
            self._kept[key] = kept
            devices.add(data.device)
            copies.append(replace(piece, data=kept))
        # On the stream of the updates, so after them. Training continues only when all is copied.
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies


def _allocate(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Page-locked memory of exactly this size; torch's allocator rounds up, and is slower."""
    kept = torch.empty(shape, dtype=dtype)
    if kept.nbytes < _LEAST_LOCKED:  # may share its pages with other tensors
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    kept.zero_()  # the pages exist now: several threads are faster at it than the driver
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(kept.data_ptr(), kept.nbytes, _FOR_ALL_GPUS)) == 0:
        unlock = weakref.finalize(kept, runtime.cudaHostUnregister, kept.data_ptr())
        unlock.atexit = False  # the process gives everything back by itself
    else:
        # Not locked, so the copy is slower, but right. CUDA keeps the error for the next kernel.
        with suppress(RuntimeError):
            torch.zeros((), device="cuda")
    return kept
