"""Check on one GPU what CPU tests cannot see: precision, determinism, resuming, compiling,
prefetched batches and pre-training from files.

    python benchmarks/gpu_check.py

Prints one line per check and exits with 1 if one of them fails.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertForSequenceClassification
from workloads import make_bert_config, make_pair_rows

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.data.indexed import IndexedWriter
from rapidformer.data.loader import DistributedLoader
from rapidformer.tasks.pretraining.runner import pretrain

ROWS = make_pair_rows(480)
for _row in ROWS:  # something learnable: the label is the parity of the first token
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
    dtypes = {p.dtype for p in check.engine.model.parallelized.model.parameters()}
    assert dtypes == {torch.float32}, dtypes
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def write_corpus(prefix: Path) -> None:
    """Documents that count upwards in steps of three."""
    dice = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(400):
            start, length = int(dice.integers(0, 500)), int(dice.integers(20, 300))
            writer.add_item(np.append((start + 3 * np.arange(length)) % 511, 511))
            writer.end_document()


def pretrain_gpt(prefix: Path, folder: Path, **settings: Any) -> list[float]:
    """The losses of a small Megatron-style GPT, trained as a black box."""
    values = {
        "task": "pretraining", "model_type": "gpt", "num_layers": 4, "hidden_size": 128,
        "num_attention_heads": 4, "seq_length": 128, "micro_batch_size": 8, "train_iters": 60,
        "global_batch_size": 16, "lr": 3e-3, "log_interval": 1, "eval_iters": 0, "seed": 3,
        "tokenizer_type": "NullTokenizer", "vocab_size": 511, "data_path": str(prefix),
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "save": str(folder),
        "log_level": "error", **settings,
    }  # fmt: skip
    pretrain(RapidformerEngine(args=values))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def has_true_batches() -> bool:
    """Whether batches prefetched on a separate stream are intact while the device is busy."""
    rows = [{"text": torch.randint(0, 1000, (257,))} for _ in range(600)]
    loaders = [
        DistributedLoader(
            rows,
            collate=torch.utils.data.default_collate,
            micro_batch_size=4,
            num_workers=2,
            device=torch.device(device),
        )
        for device in ("cuda", "cpu")
    ]
    work = torch.randn(2048, 2048, device="cuda")
    sums = []
    for batch in loaders[0]:
        work = torch.tanh(work @ work)
        # Checked only after the work: memory released too early would be overwritten by then.
        weighted = batch["text"] * torch.arange(257, device="cuda")
        sums.append(weighted.sum() + 0 * work[0, 0].long())
        del batch
    expected = [int((batch["text"] * torch.arange(257)).sum()) for batch in loaders[1]]
    return torch.stack(sums).tolist() == expected


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
            RapidformerEngine(args={"mixed_precision": "auto"}).runtime.precision.dtype
            is torch.bfloat16
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
        results["prefetched batches are intact"] = has_true_batches()
        prefix = folder / "corpus"
        write_corpus(prefix)
        slow = pretrain_gpt(prefix, folder / "p0", device="cpu", exit_interval=10)
        fast = pretrain_gpt(prefix, folder / "p1")
        results["pre-training on GPU and CPU is equal"] = get_distance(slow, fast[:10]) < 1e-3
        half = pretrain_gpt(prefix, folder / "p2", mixed_precision="bf16", compile=True)
        results["pre-training in bf16, compiled, stays near fp32"] = get_distance(half, fast) < 0.1
        workers = pretrain_gpt(prefix, folder / "p3", num_workers=0)
        results["pre-training without workers is equal"] = get_distance(workers, fast) < 1e-3
        experts = pretrain_gpt(prefix, folder / "p4", num_experts=[4], mixed_precision="bf16")
        results["experts learn"] = experts[-1] < 0.8 * experts[0]
        results["pre-training learns"] = fast[-1] < 0.8 * fast[0]
    for name, is_fine in results.items():
        print(f"{'ok    ' if is_fine else 'FAILED'} {name}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
