"""The overhead of the training loop over a bare PyTorch loop: same model, batches and threads.

    python benchmarks/loop_overhead.py [--steps 150] [--threads 1]

Both loops clip, schedule, update with fused AdamW and load the same rows in the same order. They
alternate step by step, so that other load on the machine slows both; ours logs metrics to its file
and to TensorBoard.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification, get_linear_schedule_with_warmup
from workloads import make_bert_config, make_pair_rows

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.data.collate import PadCollator
from rapidformer.optim.optimizers import group_parameters

BATCH = 8
WARM_UP = 10


def run_bare(rows: list[dict[str, Any]], order: list[int]) -> Iterator[None]:
    """The bare loop, one step per call."""
    model = BertForSequenceClassification(make_bert_config("small")).train()
    optimizer = torch.optim.AdamW(group_parameters(model, 0.01), lr=1e-4, fused=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(order) // BATCH)
    loader = DataLoader(rows, batch_size=BATCH, sampler=order, collate_fn=PadCollator())
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield


class BenchmarkFinetuner(Finetuner):
    """Times its own steps, and runs one step of the bare loop between each two of them."""

    def __init__(self, engine: RapidformerEngine, rows: list[dict[str, Any]]) -> None:
        super().__init__(engine)
        self.rows = rows
        one_by_one = RapidformerEngine(args={"micro_batch_size": 1, "log_level": "error"})
        order = one_by_one.data.build_loader(
            list(range(len(rows))), lambda indices: indices[0], shuffle=True
        )
        self.bare_steps = run_bare(rows, list(order))
        self.bare: list[float] = []
        self.ours: list[float] = []
        self.resumed = 0.0

    def train_valid_test_datasets_provider(self) -> Any:
        return self.rows, None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        return BertForSequenceClassification(make_bert_config("small")), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        start = time.perf_counter()
        if self.resumed:
            self.ours.append(start - self.resumed)
        next(self.bare_steps)
        self.resumed = time.perf_counter()
        self.bare.append(self.resumed - start)
        return model(**batch).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"micro_batch_size": BATCH, "epochs": 1, "lr": 1e-4, "log_interval": 10}
        settings |= {"log_level": "error", "tensorboard_dir": folder, "save": "none"}
        # The loop alone: without its padding, the model would be faster than the bare loop's.
        settings |= {"dynamic_shape": "off"}
        engine = RapidformerEngine(args=settings)
        finetuner = BenchmarkFinetuner(engine, make_pair_rows(BATCH * options.steps))
        finetuner.train()
    # Our step i comes between the bare steps i and i + 1; steps of the same number saw the same
    # batch.
    pairs = list(zip(finetuner.ours, finetuner.bare, strict=False))[WARM_UP:]
    ours, bare = (sum(times) * 1000 / len(pairs) for times in zip(*pairs, strict=True))
    typical = statistics.median(mine / other for mine, other in pairs)
    print(
        f"{len(pairs)} steps of {BATCH} rows, alternating, {options.threads} thread(s)\n"
        f"bare        {bare:7.1f} ms/step\n"
        f"rapidformer {ours:7.1f} ms/step\n"
        f"overhead of the loop: {100 * (ours / bare - 1):+.1f} % in total, "
        f"{100 * (typical - 1):+.1f} % in the median step"
    )


if __name__ == "__main__":
    main()
