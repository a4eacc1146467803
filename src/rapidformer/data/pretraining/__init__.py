"""Pre-training samples from ``.bin/.idx`` files: GPT, BERT and T5, split, blended, cached."""

from __future__ import annotations

from .assemble import (
    build_pretrain_huggingface_bert_datasets,
    build_pretraining_datasets,
    build_train_valid_test_datasets,
    build_train_valid_test_datasets_for_huggingface,
)
from .gpt import get_ltor_masks_and_position_ids

__all__ = [
    "build_pretrain_huggingface_bert_datasets",
    "build_pretraining_datasets",
    "build_train_valid_test_datasets",
    "build_train_valid_test_datasets_for_huggingface",
    "get_ltor_masks_and_position_ids",
]
