"""The names in a sample: Megatron's, or those of Hugging Face models."""

from __future__ import annotations

from typing import Literal

import numpy as np

Layout = Literal["megatron", "huggingface"]
IGNORED_LABEL = -100
"""The label that Hugging Face models ignore; Megatron uses a mask instead."""


def pad_row(values: np.ndarray, length: int, pad: int) -> np.ndarray:
    """The values as int64, padded to ``length``."""
    padded = np.full(length, pad, dtype=np.int64)
    padded[: values.size] = values
    return padded
