"""Models and data for the trainers' tests: tiny, made on the spot, without dropout."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification


def make_classifier(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, num_labels=2, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **settings,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def make_rows(count: int = 16, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of unequal length whose label is whether the first token is small."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        ids = draw.integers(1, 50, int(draw.integers(3, 9))).tolist()
        rows.append(
            {"input_ids": ids, "label": int(ids[0] < 25), "sentence": "words", "idx": number}
        )
    return rows


def make_dataset(count: int = 16, seed: int = 0) -> datasets.Dataset:
    return datasets.Dataset.from_list(make_rows(count, seed))


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]
    mask = [[1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])) for r in rows]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


def compute_accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}
