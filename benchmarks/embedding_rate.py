"""Embeddings beside sentence-transformers: the same model, rows, loss, batch and precision.

    python benchmarks/embedding_rate.py [--size base] [--batch 256] [--steps 40]

A BERT with fresh weights learns from pairs of short texts (6 to 40 words, half of them below 13),
as questions and titles are. Each run is a process of its own: sentence-transformers' trainer with
its MultipleNegativesRankingLoss, then ours, then sentence-transformers again. Rows per second of
the steps after the first ``--warm-up``, data loading included; peak memory on a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "intermediate_size": 3072},
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
              "intermediate_size": 1024},
}  # fmt: skip
WORDS = 2000
LENGTH = 64


def build(folder: Path, size: str, rows: int) -> None:
    """A model with its tokenizer, and a file of pairs."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"w{number}" for number in range(WORDS)]
    vocabulary = {word: number for number, word in enumerate(special + words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=LENGTH,
    ).save_pretrained(folder / "model")  # fmt: skip
    torch.manual_seed(0)
    config = BertConfig(vocab_size=30522, max_position_embeddings=512, **SIZES[size])
    BertModel(config).save_pretrained(folder / "model")
    dice = random.Random(0)

    def write() -> str:
        length = min(40, 6 + int(dice.expovariate(0.1)))
        return " ".join(dice.choice(words) for _ in range(length))

    with (folder / "train.jsonl").open("w") as file:
        for _ in range(rows):
            file.write(json.dumps({"query": write(), "positive": write()}) + "\n")


def run_peer(folder: Path, batch: int, steps: int, warm_up: int) -> dict[str, float]:
    import torch
    from datasets import load_dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import TrainerCallback

    has_gpu, times = torch.cuda.is_available(), []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kwargs) -> None:
            if len(times) in (warm_up - 1, steps - 1) and has_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    transformer = Transformer(str(folder / "model"))
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    model = SentenceTransformer(modules=[transformer, pooling])
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "peer"), per_device_train_batch_size=batch, max_steps=steps,
        learning_rate=2e-5, bf16=has_gpu, optim="adamw_torch_fused", save_strategy="no",
        report_to=[], logging_steps=10, dataloader_num_workers=2 if has_gpu else 0,
    )  # fmt: skip
    data = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model),
        callbacks=[Clock()],
    ).train()  # fmt: skip
    seconds = times[steps - 1] - times[warm_up - 1]
    memory = torch.cuda.max_memory_allocated() / 2**30 if has_gpu else 0.0
    return {"rows": batch * (steps - warm_up) / seconds, "memory": memory}


def run_ours(folder: Path, batch: int, steps: int, warm_up: int, *flags: str) -> dict[str, float]:
    import torch

    has_gpu = torch.cuda.is_available()
    words = [
        "bench", "--no-tries", "--json", "--bench-steps", steps - warm_up, "--bench-warmup",
        warm_up, "--task", "embedding", "--pretrained-model-name-or-path", folder / "model",
        "--data-path", folder / "train.jsonl", "--global-batch-size", batch, "--seq-length", LENGTH,
        "--lr", 2e-5, "--nproc-per-node", 1, *(["--mixed-precision", "bf16"] if has_gpu else []),
        *flags,
    ]  # fmt: skip
    if "--micro-batch-size" not in flags:
        words += ["--micro-batch-size", batch]
    command = [sys.executable, "-m", "rapidformer", *map(str, words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout)["run"]
    return {
        "rows": result["rows"] / sum(result["step_times"]),
        "memory": result["peak_memory"] / 2**30 if has_gpu else 0.0,
    }


RUNS = {
    "sentence-transformers": run_peer,
    "rapidformer": run_ours,
    "rapidformer, 4 micro-batches": lambda folder, batch, *more: run_ours(
        folder, batch, *more, "--micro-batch-size", str(batch // 4)
    ),
    "rapidformer, padded": lambda *given: run_ours(*given, "--dynamic-shape", "off"),
    "rapidformer --compile": lambda *given: run_ours(*given, "--compile"),
    "sentence-transformers again": run_peer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    numbers = (arguments.batch, arguments.steps, arguments.warm_up)
    if arguments.alone:
        name, folder = arguments.alone
        print("RESULT", json.dumps(RUNS[name](Path(folder), *numbers)))
        return
    with tempfile.TemporaryDirectory() as place:
        build(Path(place), arguments.size, arguments.batch * arguments.steps)
        first = 0.0
        print(f"BERT-{arguments.size}, batch {arguments.batch} of pairs of short texts")
        for name in arguments.runs:
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--alone", name, place],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
            if not lines:
                print(f"{name:32} failed: {done.stderr[-600:]}")
                continue
            result = json.loads(lines[0].removeprefix("RESULT "))
            first = first or result["rows"]
            print(
                f"{name:32} {result['rows']:9.1f} rows/s {result['rows'] / first:6.2f} x "
                f"{result['memory']:7.2f} GiB", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
