"""Small corpora in .bin/.idx files with their vocabularies: for GPT and for BERT."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rapidformer.data.indexed import IndexedWriter, choose_dtype

WORDS = [f"w{i}" for i in range(60)] + [f"##x{i}" for i in range(10)]
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = [
    "--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2, "--seq-length", 24,
    "--max-position-embeddings", 24,
]  # fmt: skip
LENGTH = [
    "--micro-batch-size", 4, "--global-batch-size", 8, "--train-iters", 4, "--lr", "5e-3",
    "--split", "80,10,10", "--log-interval", 1, "--eval-interval", 2, "--eval-iters", 2,
]  # fmt: skip


def write_gpt_corpus(folder: Path) -> list[object]:
    """Documents of byte-level tokens; returns the flags that name them."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<|endoftext|>"])}
    (folder / "gpt2-vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    dice = np.random.default_rng(0)
    prefix = folder / "gpt_text_document"
    with IndexedWriter(prefix, choose_dtype(len(vocabulary))) as writer:
        for _ in range(60):
            start, length = int(dice.integers(0, 200)), int(dice.integers(4, 40))
            writer.add_item(np.append((start + 3 * np.arange(length)) % 256, 256))
            writer.end_document()
    return [
        "--data-path", prefix, "--tokenizer-type", "GPT2BPETokenizer",
        "--vocab-file", folder / "gpt2-vocab.json", "--merge-file", folder / "gpt2-merges.txt",
    ]  # fmt: skip


def write_bert_corpus(folder: Path) -> list[object]:
    """Documents of a few sentences; returns the flags that name them."""
    vocabulary = BERT_SPECIAL + WORDS
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    dice = np.random.default_rng(1)
    prefix = folder / "bert_text_sentence"
    with IndexedWriter(prefix, choose_dtype(len(vocabulary))) as writer:
        for _ in range(80):
            for _ in range(int(dice.integers(1, 6))):
                start, length = int(dice.integers(5, 60)), int(dice.integers(3, 10))
                writer.add_item(5 + (start + np.arange(length)) % len(WORDS))
            writer.end_document()
    return [
        "--data-path", prefix, "--tokenizer-type", "BertWordPieceLowerCase",
        "--vocab-file", folder / "vocab.txt",
    ]  # fmt: skip


def read_metrics(run: Path) -> list[dict[str, float]]:
    """All lines but those of saves, which a run writes only if training waited for one."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "save_stall_s" not in line]


def get_losses(run: Path, name: str = "loss") -> list[float]:
    return [line[name] for line in read_metrics(run) if name in line]
