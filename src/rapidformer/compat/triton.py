"""Whether Triton is there and its kernels run, and where: torch's CPU builds come without it."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rapidformer.log import warn_once

PRIVATE_NAMES: dict[str, str] = {}


def has_triton(device: torch.device) -> bool:
    """Whether Triton can compile kernels for this device."""
    return device.type == "cuda" and _has_triton(device)


@functools.cache
def _has_triton(device: torch.device) -> bool:
    is_capable = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 0)
    return is_capable and importlib.util.find_spec("triton") is not None


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whatever tensors it is given."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def works_later(what: str, device: torch.device, trial: Callable[[], None]) -> Future[bool]:
    """``works`` in the background: compiling a kernel for the first time takes a second."""

    def run() -> bool:
        is_gpu = device.type == "cuda"
        # A trial reads its results. On its own stream, it does not wait for the training step.
        own_stream = torch.cuda.stream(torch.cuda.Stream(device)) if is_gpu else nullcontext()
        with torch.no_grad(), own_stream:
            return works(what, trial)

    return _get_executor().submit(run)


def compile_later(compile_kernel: Callable[[], object], device: torch.device) -> Future[object]:
    """Compile a kernel in a thread: Triton's compiler does not hold Python's lock for long."""

    def run() -> object:
        with on_device(device):
            return compile_kernel()

    return _get_compilers().submit(run)


@functools.cache
def _get_compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        min(8, os.cpu_count() or 1), thread_name_prefix="rapidformer-compiler"
    )


@functools.cache
def _get_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rapidformer-kernels")


def works(what: str, trial: Callable[[], None]) -> bool:
    """Whether a trial of kernels succeeds; a warning says why not."""
    try:
        trial()
    except Exception as error:  # whatever Triton, its compiler or the driver may raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        warn_once(
            f"the Triton kernel for {what} cannot be used here ({reason}). torch's own code runs "
            "instead, which is slower."
        )
        return False
    return True
