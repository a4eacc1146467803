"""A script that trains a CrossEncoder, for sentence-transformers and for its dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification

from tests.small import SPECIAL, WORDS, make_tokenizer

PAIRS = [("w1 w2", "w3"), ("w4", "w5 w6 w7"), ("w1 w2", "w2 w1")]


def make_folder(folder: Path) -> Path:
    """Without dropout, which the two draw differently."""
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL + WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=1, initializer_range=0.3,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def make_rows(name: str, count: int) -> Dataset:
    """Pairs with labels, or positives and negatives with a teacher's margin, or lists."""
    dice = np.random.default_rng(0)

    def say() -> str:
        return " ".join(dice.choice(WORDS, dice.integers(2, 8)))

    rows: list[dict[str, Any]] = []
    for number in range(count):
        row: dict[str, Any] = {"asked": say(), "found": say(), "label": number % 2}
        if name == "MarginMSELoss":
            row = {"asked": say(), "found": say(), "other": say(), "score": float(dice.normal())}
        elif name == "MSELoss":
            row["label"] = float(dice.normal())
        elif name == "ListNetLoss":
            found = [say() for _ in range(2 + number % 2)]
            row = {"asked": say(), "found": found, "labels": dice.random(len(found)).tolist()}
        rows.append(row)
    return Dataset.from_list(rows)


def run_script(library: Any, name: str, folder: Path, output: Path, **options: Any) -> Any:
    """The losses and gradient norms of all steps, the scores before and after, and the trainer.

    A batch is the whole data: the two shuffle differently.
    """
    model = library.CrossEncoder(str(folder), num_labels=1, max_length=64, device="cpu")
    before, rows = model.predict(PAIRS), make_rows(name, 8)
    arguments = library.CrossEncoderTrainingArguments(
        output_dir=str(output), max_steps=4, per_device_train_batch_size=8, learning_rate=0.03,
        optim="sgd", logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = library.CrossEncoderTrainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows,
        loss=getattr(library.losses, name)(model, **options),
    )  # fmt: skip
    trainer.train()
    found = [line for line in trainer.state.log_history if "loss" in line]
    steps = [(line["loss"], line["grad_norm"]) for line in found]
    return steps, before, model.predict(PAIRS), model, trainer
