"""What BERT's and T5's samples share: their sentences, their random numbers, names and padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np

from rapidformer.data.indexed import IndexedDataset

Layout = Literal["megatron", "huggingface"]
"""The names in a sample: Megatron's, or those of Hugging Face models."""
IGNORED_LABEL = -100
"""The label that Hugging Face models ignore; Megatron uses a mask instead."""


@dataclass(frozen=True, eq=False)
class SentenceDataset:
    """Samples of a sentence map; one depends only on the seed and its own index."""

    data: IndexedDataset
    maps: Mapping[str, np.ndarray]
    _: KW_ONLY
    max_seq_length: int
    masked_lm_prob: float
    seed: int
    layout: Layout = "megatron"

    def __len__(self) -> int:
        return len(self.maps["rows"])

    def read(self, index: int) -> tuple[list[np.ndarray], int, np.random.RandomState]:
        """The sentences of a sample, its target length and its random numbers."""
        rows = self.maps["rows"]
        if not -len(rows) <= index < len(rows):
            raise IndexError(f"sample {index} of {len(rows)}")
        index %= len(rows)
        start, end, target_length = rows[index].tolist()
        random = np.random.RandomState((self.seed + index) % 2**32)
        return self.data[start:end], target_length, random


def pad_row(values: np.ndarray, length: int, pad: int) -> np.ndarray:
    """The values as int64, padded to ``length``."""
    padded = np.full(length, pad, dtype=np.int64)
    padded[: values.size] = values
    return padded
