"""Import DeepSpeed quietly, announce what it compiles, and clean up what it leaves behind."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rapidformer.errors import MissingPackageError
from rapidformer.log import get_logger


def import_deepspeed(device: torch.device, level: str) -> Any:
    """The package, quiet, and kept from compiling what training does not need."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Its banner goes to standard output on import.
    logger = logging.getLogger("DeepSpeed")
    try:
        import deepspeed
    except ImportError as reason:
        if reason.name not in (None, "deepspeed"):
            raise
        raise MissingPackageError("deepspeed", "--deepspeed", "deepspeed") from None
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    for handler in get_logger().handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if level == "debug" else logging.ERROR)
    # Its collectives use names that torch has deprecated, and would warn at every call.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
    if device.type == "cpu":
        # Shared-memory communication for inference: a minute of compiling that training never uses.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def announce_build() -> None:
    """DeepSpeed's own optimizers are compiled at first use: silently, and behind a lock."""
    if int(os.environ.get("LOCAL_RANK", "0")):
        return
    from torch.utils.cpp_extension import get_default_build_root

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    get_logger().info("DeepSpeed may compile its optimizer now, in %s; this takes minutes.", folder)
    for lock in folder.rglob("lock"):
        get_logger().warning(
            "%s: another run is compiling, or was killed while it was. If none is, delete that "
            "file, or this run will wait forever.",
            lock,
        )


@contextmanager
def in_process_group(device: torch.device) -> Iterator[None]:
    """DeepSpeed needs a process group and LOCAL_RANK even for a single process."""
    if not dist.is_initialized():
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
    is_launched = "LOCAL_RANK" in os.environ
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        yield
    finally:
        if not is_launched:
            # Some platforms set RANK without LOCAL_RANK to number nodes: restore it.
            del os.environ["LOCAL_RANK"]
