"""What tests on a CPU cannot see, checked on one GPU: precision, determinism, resuming, compiling.

    python benchmarks/gpu_check.py

Prints one line a check and exits with 1 if one of them fails.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import BertForSequenceClassification
from workloads import make_bert_config, make_pair_rows

from rapidformer import Finetuner, RapidformerEngine

ROWS = make_pair_rows(480)
for _row in ROWS:  # something that can be learnt: the label is the first token's parity
    _row["labels"] = _row["input_ids"][0] % 2


class Check(Finetuner):
    def train_valid_test_datasets_provider(self) -> Any:
        return ROWS, None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        return BertForSequenceClassification(make_bert_config("small")), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss


def train(folder: Path, **settings: Any) -> list[float]:
    """The loss of every step of a short run with dropout."""
    values = {"micro_batch_size": 16, "epochs": 1, "lr": 5e-4, "log_interval": 1, "seed": 3}
    values |= {"save": str(folder), "log_level": "error", **settings}
    check = Check(RapidformerEngine(args=values))
    check.train()
    dtypes = {p.dtype for p in check.engine.parallelized.model.parameters()}
    assert dtypes == {torch.float32}, dtypes
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def get_distance(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def main() -> int:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        fp32 = train(folder / "fp32")
        results = {
            "bf16 stays near fp32": get_distance(
                train(folder / "bf16", mixed_precision="bf16"), fp32
            ) < 0.05,
            "fp16 stays near fp32": get_distance(
                train(folder / "fp16", mixed_precision="fp16"), fp32
            ) < 0.05,
            "--compile stays near fp32": get_distance(train(folder / "c", compile=True), fp32)
            < 0.05,
        }  # fmt: skip
        results["auto precision is bf16"] = (
            RapidformerEngine(args={"mixed_precision": "auto"}).precision.dtype is torch.bfloat16
        )
        first = train(folder / "d1", deterministic=True, mixed_precision="bf16", save_interval=10)
        again = train(folder / "d2", deterministic=True, mixed_precision="bf16")
        resumed = train(
            folder / "d3",
            deterministic=True,
            mixed_precision="bf16",
            load=str(folder / "d1" / "iter_0000010"),
        )
        results["--deterministic twice, bit for bit"] = first == again
        results["resumed, bit for bit"] = first[10:] == resumed
    for name, is_fine in results.items():
        print(f"{'ok    ' if is_fine else 'FAILED'} {name}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
