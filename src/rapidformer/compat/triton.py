"""Whether Triton is there: torch's CPU builds come without it."""

from __future__ import annotations

import functools
import importlib.util

import torch

PRIVATE_NAMES: dict[str, str] = {}


def has_triton(device: torch.device) -> bool:
    """Whether Triton can compile kernels for this device."""
    return device.type == "cuda" and _has_triton(device)


@functools.cache
def _has_triton(device: torch.device) -> bool:
    is_capable = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 0)
    return is_capable and importlib.util.find_spec("triton") is not None
