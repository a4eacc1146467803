"""Import DeepSpeed quietly, announce what it compiles, and clean up what it leaves behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from rapidformer.compat.patches import Entry, Patch, ignore_warnings, quieten, variables
from rapidformer.dist.topology import start_lone_group
from rapidformer.errors import MissingPackageError
from rapidformer.log import get_logger


def import_deepspeed(device: torch.device, level: str, changes: ExitStack) -> Any:
    """The package: quiet, and kept from compiling what training does not need."""
    is_cpu = device.type == "cpu"
    try:
        with variables({"DS_ACCELERATOR": "cpu"}, keeps=True) if is_cpu else nullcontext():
            import deepspeed
    except ImportError as reason:
        if reason.name not in (None, "deepspeed"):
            raise
        raise MissingPackageError("deepspeed", "--deepspeed", "deepspeed") from None
    changes.enter_context(_DEPRECATED)
    if level != "debug":
        changes.enter_context(_QUIET)
    if is_cpu:
        changes.enter_context(_UNCOMPILED)
    return deepspeed


# Its collectives use names that torch has deprecated, and would warn at every call.
_DEPRECATED = ignore_warnings(r"`torch\.distributed\.\w+` is deprecated")
_QUIET = quieten("DeepSpeed")
# Shared-memory communication for inference: a minute of compiling that training never uses.
_UNCOMPILED = Patch(lambda: [Entry(_list_ops(), "deepspeed_shm_comm", lambda _: False)])


def _list_ops() -> dict[str, bool]:
    from deepspeed.ops import __compatible_ops__

    return __compatible_ops__


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
    start_lone_group(device.type)
    # Not for good: some platforms set RANK without LOCAL_RANK to number nodes.
    with variables({"LOCAL_RANK": "0"}, keeps=True):
        yield
