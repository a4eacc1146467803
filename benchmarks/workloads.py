"""The models and data that the benchmarks have in common; generated, never downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import BertConfig


def make_bert_config(size: str) -> BertConfig:
    """``base`` is BERT-base; ``medium`` and ``small`` are for CPUs."""
    if size == "base":
        return BertConfig(num_labels=2)
    if size == "medium":
        return BertConfig(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            num_labels=2,
        )
    return BertConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        num_labels=2,
    )


def make_pair_rows(count: int, *, shortest: int = 20, longest: int = 99) -> list[dict[str, Any]]:
    """Rows like those of a sentence-pair task: uniformly distributed lengths, two labels."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        length = int(random.integers(shortest, longest + 1))
        ids = random.integers(1000, 30000, length).tolist()
        rows.append({"input_ids": ids, "labels": int(random.integers(0, 2))})
    return rows
