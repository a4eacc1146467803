"""What the training loop costs over a bare PyTorch loop: same model, batches, threads, one run.

    python benchmarks/loop_overhead.py [--rounds 7] [--steps 40]

Both loops clip, schedule, update with fused AdamW and load the same rows in the same order. They
take turns, so that a busy machine slows both; the ratio of the medians is the result.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification, get_linear_schedule_with_warmup
from workloads import make_bert_config, make_pair_rows

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.data.collate import PadCollator
from rapidformer.optim.optimizers import group_parameters

BATCH = 8


def run_bare(rows: list[dict[str, Any]], order: list[int], steps: int) -> float:
    torch.manual_seed(0)
    model = BertForSequenceClassification(make_bert_config("small")).train()
    optimizer = torch.optim.AdamW(group_parameters(model, 0.01), lr=1e-4, fused=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, steps)
    loader = DataLoader(rows, batch_size=BATCH, sampler=order, collate_fn=PadCollator())
    start = time.perf_counter()
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return time.perf_counter() - start


class BenchmarkFinetuner(Finetuner):
    """Fine-tunes on given rows, and times the loop alone."""

    rows: list[dict[str, Any]]
    seconds = 0.0

    def train_valid_test_datasets_provider(self) -> Any:
        return self.rows, None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        torch.manual_seed(0)
        return BertForSequenceClassification(make_bert_config("small")), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss

    def run_loop(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return super().run_loop(*args, **kwargs)
        finally:
            self.seconds = time.perf_counter() - start


def run_ours(rows: list[dict[str, Any]], folder: str) -> float:
    settings = {
        "micro_batch_size": BATCH,
        "epochs": 1,
        "lr": 1e-4,
        "log_interval": 10,
        "log_level": "error",
        "tensorboard_dir": folder,
    }
    finetuner = BenchmarkFinetuner(RapidformerEngine(args=settings))
    finetuner.rows = rows
    finetuner.train()
    return finetuner.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = make_pair_rows(BATCH * options.steps)
    engine = RapidformerEngine(args={"micro_batch_size": 1})
    order = engine.build_data_loader(list(range(len(rows))), lambda i: i[0], shuffle=True)
    indices = list(order)
    bare, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(options.rounds + 1):
            times = run_bare(rows, indices, options.steps), run_ours(rows, folder)
            if round_number:  # the first one warms up
                bare.append(times[0])
                ours.append(times[1])
    ratio = statistics.median(ours) / statistics.median(bare)
    print(
        f"{options.steps} steps of {BATCH} rows, {options.threads} thread(s), medians of "
        f"{options.rounds} rounds\n"
        f"bare        {statistics.median(bare) * 1000 / options.steps:7.1f} ms/step\n"
        f"rapidformer {statistics.median(ours) * 1000 / options.steps:7.1f} ms/step\n"
        f"cost of the loop: {100 * (ratio - 1):+.1f} %"
    )


if __name__ == "__main__":
    main()
