"""Where a tensor's bytes are, as torch's own checkpoint index says it."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo

PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
PRIVATE_NAMES = {PLACE: "reading and writing a checkpoint's index"}


def build_place(file: str, start: int, length: int) -> Any:
    """A range of bytes in one of the checkpoint's files."""
    return _StorageInfo(relative_path=file, offset=start, length=length)
