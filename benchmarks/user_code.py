"""What a user's own Python in a step costs: BERT-base, rows of 20 to 99 tokens, on one GPU.

    python benchmarks/user_code.py [--batch 16] [--steps 300] [--size base] [--runs 2]

A counter and a clock in ``run_forward_step`` prevent one CUDA graph of the whole step; one line
reads its loss in every step, which waits for the GPU. Data loading is included, the first third of
the steps is not.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from peers import DEVICE, HAS_GPU, Stopwatch
from transformers import BertForSequenceClassification
from workloads import make_bert_config, make_pair_rows

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.training.callbacks import Callback


class Plain(Finetuner):
    """A step without anything else."""

    def __init__(self, options: argparse.Namespace, **more: Any) -> None:
        settings: dict[str, Any] = {
            "micro_batch_size": options.batch, "epochs": 1, "lr": 2e-5, "log_interval": 50,
            "dataloader_type": "single", "save": "none", "seed": 1,
        }  # fmt: skip
        settings |= {"mixed_precision": "bf16"} if HAS_GPU else {}
        super().__init__(RapidformerEngine(args={**settings, **more}))
        self.options, self.watch = options, Stopwatch(options.steps // 3)
        self.count, self.seconds = 0, 0.0
        watch = self.watch

        class Watch(Callback):
            def on_step_begin(self, *_: Any) -> None:
                watch.begin_step()

        self.callbacks = (Watch(),)

    def train_valid_test_datasets_provider(self) -> Any:
        return make_pair_rows(self.options.steps * self.options.batch), None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        torch.manual_seed(0)
        with DEVICE:
            return (
                BertForSequenceClassification(make_bert_config(self.options.size)), None, None
            )  # fmt: skip

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss


class Counting(Plain):
    """A counter and a clock."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        started = time.perf_counter()
        loss = model(**batch).loss
        self.count += 1
        self.seconds += time.perf_counter() - started
        return loss


class Reading(Plain):
    """Reads the loss in every step."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        loss = model(**batch).loss
        self.seconds += loss.item()
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--size", default="base" if HAS_GPU else "small")
    parser.add_argument("--runs", type=int, help="only the first ones")
    options = parser.parse_args()
    runs: list[tuple[str, type[Plain], dict[str, Any]]] = [
        ("nothing else", Plain, {}),
        ("a counter and a clock", Counting, {}),
        ("the same, --cuda-graph off", Counting, {"cuda_graph": "off"}),
        ("reads its loss", Reading, {}),
    ]
    lines = []
    for name, kind, more in runs[: options.runs]:
        run = kind(options, **more)
        run.train()
        run.watch.stop()
        measured = options.steps - options.steps // 3
        milliseconds = 1e3 * (run.watch.stopped - run.watch.started) / measured
        lines.append(f"| {name} | {milliseconds:.2f} ms |")
        run.engine.close()
    print("| in the step | time per step |\n|---|---|", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
