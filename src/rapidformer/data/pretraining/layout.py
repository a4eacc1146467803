"""Under which names a sample comes: Megatron's, or those that Hugging Face's models take."""

from __future__ import annotations

from typing import Literal

import numpy as np

Layout = Literal["megatron", "huggingface"]
IGNORED_LABEL = -100
"""What a loss leaves out in Hugging Face's models; Megatron has a mask for it."""


def pad_row(values: np.ndarray, length: int, pad: int) -> np.ndarray:
    """The values as int64, filled up to ``length``."""
    padded = np.full(length, pad, dtype=np.int64)
    padded[: values.size] = values
    return padded
