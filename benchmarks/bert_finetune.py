"""BERT fine-tuning on one GPU or CPU: rapidformer against Hugging Face's Trainer.

    python benchmarks/bert_finetune.py [--batch 16 64] [--steps 100]

Rows of 20 to 99 tokens, dynamic padding, fused AdamW, clipping at 1, data loading included, the
first steps excluded. Padding does not count as tokens. BERT-base in bf16 on a GPU, 6 layers of 384
in fp32 on a CPU. Each run has its own process, which is started with ``--only``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import BertForSequenceClassification
from workloads import make_bert_config, make_pair_rows

HAS_GPU = torch.cuda.is_available()
WARM_UP = 20 if HAS_GPU else 3
SIZE = "base" if HAS_GPU else "medium"


def count_tokens(rows: list[dict[str, Any]]) -> int:
    return sum(len(row["input_ids"]) for row in rows)


class Stopwatch:
    """Starts after the warm-up steps and stops at the end; waits for the device both times."""

    def __init__(self) -> None:
        self.steps = 0
        self.started = self.stopped = 0.0

    def tick(self) -> None:
        self.steps += 1
        if self.steps == WARM_UP:
            self._wait()
            self.started = time.perf_counter()

    def stop(self) -> None:
        self._wait()
        self.stopped = time.perf_counter()

    @staticmethod
    def _wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def run_rapidformer(rows: list[dict[str, Any]], batch: int, more: dict[str, Any]) -> Stopwatch:
    from rapidformer import Finetuner, RapidformerEngine

    watch = Stopwatch()

    class Bench(Finetuner):
        def train_valid_test_datasets_provider(self) -> Any:
            return rows, None, None, None

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            return BertForSequenceClassification(make_bert_config(SIZE)), None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            watch.tick()
            return model(**batch).loss

    settings = {"micro_batch_size": batch, "epochs": 1, "lr": 2e-5, **more}
    settings |= {"dataloader_type": "single", "log_interval": 50, "save": "none"}
    settings |= {"mixed_precision": "bf16"} if HAS_GPU else {}
    Bench(RapidformerEngine(args=settings)).train()
    watch.stop()
    return watch


def run_hugging_face(rows: list[dict[str, Any]], batch: int) -> Stopwatch:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from rapidformer.data.collate import PadCollator

    watch = Stopwatch()

    class Ticks(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.tick()

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch,
            num_train_epochs=1,
            learning_rate=2e-5,
            bf16=HAS_GPU,
            use_cpu=not HAS_GPU,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            dataloader_num_workers=2 if HAS_GPU else 0,
            disable_tqdm=True,
        )
        InOrder(
            model=BertForSequenceClassification(make_bert_config(SIZE)),
            args=arguments,
            train_dataset=rows,
            data_collator=PadCollator(),
            callbacks=[Ticks()],
        ).train()
    watch.stop()
    return watch


RUNS = {
    "HF Trainer": lambda rows, batch: run_hugging_face(rows, batch),
    "rapidformer": lambda rows, batch: run_rapidformer(rows, batch, {}),
    "rapidformer, padded": lambda rows, batch: run_rapidformer(
        rows, batch, {"dynamic_shape": "off"}
    ),
    "rapidformer --compile": lambda rows, batch: run_rapidformer(rows, batch, {"compile": True}),
}


def run_one(name: str, batch: int, steps: int) -> None:
    rows = make_pair_rows(batch * steps)
    watch = RUNS[name](rows, batch)
    tokens = count_tokens(rows[(WARM_UP - 1) * batch :])
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    result = {"tokens": tokens / (watch.stopped - watch.started), "memory": memory}
    print("RESULT " + json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--steps", type=int, default=100 if HAS_GPU else 13)
    parser.add_argument("--only", choices=RUNS)
    options = parser.parse_args()
    if options.only:
        run_one(options.only, options.batch[0], options.steps)
        return
    lines = []
    for batch in options.batch:
        for name in RUNS:
            command = [sys.executable, __file__, "--only", name, "--batch", str(batch)]
            command += ["--steps", str(options.steps)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not found:
                lines.append(f"{name:<24} {batch:>5}   failed: {done.stderr.strip()[-300:]}")
                continue
            result = json.loads(found[0].removeprefix("RESULT "))
            speed = f"{result['tokens'] / 1000:8.1f}k tokens/s"
            lines.append(f"{name:<24} {batch:>5}   {speed}   {result['memory']:5.1f} GiB")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"BERT ({SIZE}), {device}, torch {torch.__version__}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
