"""A small pair data set, tokenizer and BERT on disk: what a user would have, in miniature."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{i}" for i in range(40)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def make_model_folder(folder: Path, *, dropout: float = 0.1) -> Path:
    """A BERT with fresh weights and its tokenizer, as ``from_pretrained`` finds them."""
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def make_pair_data(
    folder: Path,
    *,
    train: int = 90,
    validation: int = 21,
    test: int = 11,
    words: int | None = None,
) -> Path:
    """Pairs whose label says whether the first sentence has more words of the first half.

    A sentence has 3 to 12 words, or exactly ``words``.
    """
    fewest, most = (3, 12) if words is None else (words, words)
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(0)
    for split, count in (("train", train), ("validation", validation), ("test", test)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for i in range(count):
                label = dice.randint(0, 1)
                pool = WORDS[:20] if label else WORDS[20:]
                first = " ".join(dice.choice(pool) for _ in range(dice.randint(fewest, most)))
                second = " ".join(dice.choice(WORDS) for _ in range(dice.randint(fewest, most)))
                row = {"sentence1": first, "sentence2": second, "label": label, "idx": i}
                file.write(json.dumps(row) + "\n")
    return folder
