"""BERT's masking: of the chosen tokens, 80 % are masked, 10 % replaced and 10 % kept.

A row's masks depend on its seed alone, never on the rows next to it, and every row keeps a label;
transformers' ``DataCollatorForLanguageModeling`` promises neither.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rapidformer.data.random_numbers import SampleSeed, get_sample_seeds
from rapidformer.tasks.base import IGNORED_LABEL
from rapidformer.tasks.text.text import build_text_collator

Row = dict[str, Any]
_HIDDEN_FRACTION = 0.8
_REPLACED_FRACTION = 0.1


def mask_tokens(
    ids: np.ndarray, draws: np.ndarray, tokenizer: Any, fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Masked ids and labels; ``draws`` are three uniform numbers per token, shaped [3, *ids]."""
    special = np.isin(ids, np.array(tokenizer.all_special_ids, dtype=np.int64))
    order = np.where(special, 2.0, draws[0])
    # Always take the smallest draw, so that even a short row has a masked token.
    smallest = order == order.min(axis=-1, keepdims=True)
    chosen = ((order < fraction) | smallest) & ~special
    labels = np.where(chosen, ids, IGNORED_LABEL)
    hidden = chosen & (draws[1] < _HIDDEN_FRACTION)
    replaced = chosen & ~hidden & (draws[1] < _HIDDEN_FRACTION + _REPLACED_FRACTION)
    masked = np.where(hidden, tokenizer.mask_token_id, ids)
    return np.where(replaced, (draws[2] * len(tokenizer)).astype(ids.dtype), masked), labels


def mask_row(row: Row, seed: SampleSeed, tokenizer: Any, fraction: float) -> Row:
    """A row with masked tokens and their labels: the same ones for the same seed."""
    ids = np.asarray(row["input_ids"])
    draws = np.random.default_rng(seed).random((3, len(ids)))
    masked, labels = mask_tokens(ids, draws, tokenizer, fraction)
    return {**row, "input_ids": masked, "labels": labels}


class MaskingCollator:
    """Dynamic padding and, for rows without labels, dynamic masking."""

    def __init__(self, tokenizer: Any, fraction: float) -> None:
        self.tokenizer = tokenizer
        self.fraction = fraction
        self.pad = build_text_collator(tokenizer)

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        if "labels" not in rows[0]:
            seeds = get_sample_seeds(len(rows))
            rows = [
                mask_row(row, seed, self.tokenizer, self.fraction)
                for row, seed in zip(rows, seeds, strict=True)
            ]
        return self.pad(rows)
