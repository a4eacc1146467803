"""Fine-tuning on rows of very different lengths, answers only: Qwen3 0.6B, 50 to 1,500 tokens.

    python benchmarks/long_rows.py [--batch 8] [--steps 24] [--size full] [--held]
        [--set compile=true ...]

Prints the real tokens per second, the peak of the memory, and the tokens and the peak of each step.
--held trains on the rows of ``held.py``, whose 46th batch of 8 has the most tokens: 7,366.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import torch
from held_models import make_skewed_rows
from peers import DEVICE, HAS_GPU, Stopwatch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.training.callbacks import Callback

_GIB = 2**30


def make_answer_rows(count: int, vocabulary: int, *, shortest: int, longest: int) -> Any:
    """Most rows are short and a few long; the last third of each is the answer."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        length = int(math.exp(random.uniform(math.log(shortest), math.log(longest))))
        ids = random.integers(5, vocabulary, length).tolist()
        start = length - length // 3
        rows.append({"input_ids": ids, "labels": [-100] * start + ids[start:]})
    return rows


def build_qwen3(size: str) -> Qwen3ForCausalLM:
    sizes: dict[str, Any] = {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960,
    }  # fmt: skip
    if size == "tiny":
        sizes |= {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 8192}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    return Qwen3ForCausalLM(Qwen3Config(**sizes))


class Memory(Callback):
    """The peak of each step."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self.peaks: list[float] = []

    def on_step_begin(self, *_: Any) -> None:
        self._watch.begin_step()
        if HAS_GPU:
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *_: Any) -> None:
        if HAS_GPU:
            self.peaks.append(torch.cuda.max_memory_allocated() / _GIB)


class Bench(Finetuner):
    def __init__(self, options: argparse.Namespace, rows: Any) -> None:
        more = dict(each.split("=", 1) for each in options.set)
        settings: dict[str, Any] = {
            "micro_batch_size": options.batch, "epochs": 1, "lr": 2e-5, "log_interval": 5,
            "dataloader_type": "single", "save": "none", "seed": 1,
        }  # fmt: skip
        settings |= {"mixed_precision": "bf16"} if HAS_GPU else {}
        values = {name: {"true": True, "false": False}.get(v, v) for name, v in more.items()}
        super().__init__(RapidformerEngine(args={**settings, **values}))
        self.options, self.rows = options, rows
        self.watch = Stopwatch(options.steps // 3)
        self.memory = Memory(self.watch)
        self.callbacks = (self.memory,)

    def train_valid_test_datasets_provider(self) -> Any:
        return self.rows, None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        torch.manual_seed(0)
        with DEVICE:
            return build_qwen3(self.options.size), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--size", default="full" if HAS_GPU else "tiny")
    parser.add_argument("--held", action="store_true", help="the rows of held.py")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    count = options.steps * options.batch
    longest = 1500 if options.size == "full" else 150
    vocabulary = 151936 if options.size == "full" else 8192
    rows = make_answer_rows(count, vocabulary, shortest=50, longest=longest)
    if options.held:
        rows = make_skewed_rows(count, "answers", (50, longest), vocabulary)
    run = Bench(options, rows)
    run.train()
    run.watch.stop()
    timed = rows[options.steps // 3 * options.batch :]
    rate = sum(len(row["input_ids"]) for row in timed) / (run.watch.stopped - run.watch.started)
    peaks = run.memory.peaks
    print(f"{rate:,.0f} tokens/s, first step {run.watch.first_step:.1f} s, peak "
          f"{max(peaks, default=0.0):.1f} GiB; by step, with its tokens:")  # fmt: skip
    lengths = [len(row["input_ids"]) for row in rows]
    for step, peak in enumerate(peaks):
        tokens = sum(lengths[step * options.batch : (step + 1) * options.batch])
        print(f"{step + 1:3}: {tokens:6,} tokens, {peak:5.1f} GiB")


if __name__ == "__main__":
    main()
