"""BERT's masking: of the chosen tokens, 80 % are masked, 10 % replaced and 10 % kept.

The random numbers come from the caller, so that training (torch's generator) and evaluation (fixed
by seed and row) use the same rule. Every row keeps at least one label: a batch without labels has
no mean loss. transformers' ``DataCollatorForLanguageModeling`` promises neither.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rapidformer.tasks.text import build_text_collator

IGNORED_LABEL = -100
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


class MaskingCollator:
    """Dynamic padding and, for rows without labels, dynamic masking."""

    def __init__(self, tokenizer: Any, fraction: float) -> None:
        self.tokenizer = tokenizer
        self.fraction = fraction
        self.pad = build_text_collator(tokenizer)

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = self.pad(rows)
        if "labels" not in batch:
            ids = batch["input_ids"].numpy()
            draws = torch.rand(3, *ids.shape, dtype=torch.float64).numpy()
            masked, labels = mask_tokens(ids, draws, self.tokenizer, self.fraction)
            batch["input_ids"] = torch.from_numpy(masked)
            batch["labels"] = torch.from_numpy(labels)
        return batch
