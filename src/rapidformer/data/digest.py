"""A short fingerprint of rows, to see whether processes have read the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch


def compute_digest(rows: Any) -> str:
    """Equal for equal rows, in whatever process."""
    digest = hashlib.sha256()
    _add(digest, rows)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _add(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)}:".encode())
        for item in value:
            _add(digest, item)
    elif hasattr(value, "tobytes"):  # arrays and images
        digest.update(value.tobytes())
    elif isinstance(value, (str, bytes, int, float, bool, type(None))):
        digest.update(repr(value).encode())
    else:
        # Its repr may hold an address, which differs between processes.
        digest.update(type(value).__name__.encode())
