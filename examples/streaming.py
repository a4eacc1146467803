"""Train on a stream, stop, and go on: in seconds on a CPU, without a download.

Shards in two formats are written and then read row by row while a small classifier is trained. The
second run is stopped in the middle and resumed with worker processes: it gets the very rows that
the first one gets, and so has the same losses. With models and data of your own, this is one
command (docs/streaming.md).
"""

import json
import random
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import rapidformer

WORDS = ["[PAD]", "[UNK]", *(f"good{n}" for n in range(20)), *(f"bad{n}" for n in range(20))]


def make_model(folder: Path) -> str:
    """A model with fresh weights and its tokenizer, as ``from_pretrained`` finds them."""
    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def write_shards(folder: Path) -> None:
    """Shards of training rows, and a file of validation rows."""
    dice = random.Random(0)

    def make_rows(count: int) -> list[dict[str, str]]:
        labels = [dice.choice(["good", "bad"]) for _ in range(count)]
        texts = (" ".join(f"{label}{dice.randrange(20)}" for _ in range(6)) for label in labels)
        return [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]

    folder.mkdir()
    for name in ("train-0.jsonl", "train-1.jsonl", "valid.jsonl"):
        lines = "".join(json.dumps(row) + "\n" for row in make_rows(300))
        (folder / name).write_text(lines)
    table = pyarrow.Table.from_pylist(make_rows(300))
    pyarrow.parquet.write_table(table, folder / "train-2.parquet", row_group_size=50)


def read_losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def main(folder: Path) -> None:
    write_shards(folder / "data")
    settings = {
        "task": "sequence_classification", "streaming": True, "shuffle_buffer": 200,
        "train_iters": 12, "micro_batch_size": 16, "lr": 2e-2, "log_interval": 1,
        "progress": False, "pretrained_model_name_or_path": make_model(folder / "model"),
    }  # fmt: skip
    data, whole, broken = folder / "data", folder / "whole", str(folder / "broken")
    metrics = rapidformer.train(data, save=str(whole), **settings)
    rapidformer.train(data, save=broken, exit_interval=5, **settings)
    rapidformer.train(data, save=broken, load=broken, num_workers=1, **settings)
    print(f"accuracy {metrics['accuracy']:.3f}")
    print(f"same losses after a resume: {read_losses(whole) == read_losses(Path(broken))}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
