"""Every workload of the docs: rapidformer against Hugging Face's Trainer and a plain loop.

    python benchmarks/peers.py [--size tiny] [--workloads gpt2 lora] [--steps 30] [--picture FILE]

Each run has its own process, data loading included, the first steps excluded; padding does not
count. bf16 on a GPU, fp32 on a CPU; fused AdamW and clipping everywhere. rapidformer runs with
its defaults, then with --compile. Prints a table in Markdown, and draws it with --picture.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from workloads import Rows, Workload, list_workloads

from rapidformer.accel.matrix_rate import measure_matrix_rate
from rapidformer.data.collate import PadCollator
from rapidformer.models.work import count_work

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
WARM_UP = 12 if HAS_GPU else 2
LIMIT = 400
"""Seconds for one run."""
TARGETS = "all-linear"


class Stopwatch:
    """Starts after the warm-up steps; waits for the device at both ends."""

    def __init__(self) -> None:
        self._steps = 0
        self._began = time.perf_counter()
        self.first_step = self.started = self.stopped = 0.0

    def begin_step(self) -> None:
        """Call before the forward pass of each step."""
        if self._steps in (1, WARM_UP):
            wait()
        if self._steps == 1:
            self.first_step = time.perf_counter() - self._began
        if self._steps == WARM_UP:
            self.started = time.perf_counter()
        self._steps += 1

    def stop(self) -> None:
        wait()
        self.stopped = time.perf_counter()


def wait() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def run_rapidformer(work: Workload, rows: Rows, watch: Stopwatch, **more: Any) -> None:
    from rapidformer import Finetuner, RapidformerEngine

    class Bench(Finetuner):
        def train_valid_test_datasets_provider(self) -> Any:
            return rows, None, None, None

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            return work.build(), None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            watch.begin_step()
            return model(**batch).loss

    settings: dict[str, Any] = {
        "micro_batch_size": work.batch, "epochs": 1, "lr": 2e-5, "log_interval": 50,
        "dataloader_type": "single", "save": "none",
    }  # fmt: skip
    settings |= {"mixed_precision": "bf16"} if HAS_GPU else {}
    if work.lora_rank:
        settings |= {"lora_rank": work.lora_rank, "lora_target_modules": [TARGETS]}
    Bench(RapidformerEngine(args={**settings, **more})).train()


def add_lora(model: Any, rank: int | None) -> Any:
    if rank is None:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS))


def run_trainer(work: Workload, rows: Rows, watch: Stopwatch, **more: Any) -> None:
    from transformers import Trainer, TrainingArguments

    class Bench(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            watch.begin_step()
            return super().training_step(*args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=work.batch,
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
            **more,
        )
        model = add_lora(work.build(), work.lora_rank)
        Bench(model=model, args=arguments, train_dataset=rows, data_collator=PadCollator()).train()


def run_plain_loop(work: Workload, rows: Rows, watch: Stopwatch) -> None:
    """What a careful engineer writes by hand, compiled as a whole."""
    model = add_lora(work.build().to(DEVICE), work.lora_rank)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, fused=True)
    compiled = torch.compile(model)
    loader = torch.utils.data.DataLoader(
        rows, batch_size=work.batch, collate_fn=PadCollator(),
        num_workers=2 if HAS_GPU else 0, pin_memory=HAS_GPU,
    )  # fmt: skip
    for batch in loader:
        watch.begin_step()
        batch = {name: value.to(DEVICE, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=HAS_GPU):
            loss = compiled(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


Run = Callable[[Workload, Rows, Stopwatch], None]
RUNS: dict[str, Run] = {
    "HF Trainer": run_trainer,
    "HF Trainer + compile": lambda *args: run_trainer(*args, torch_compile=True),
    "HF Trainer + Liger": lambda *args: run_trainer(*args, use_liger_kernel=True),
    "plain loop + compile": run_plain_loop,
    "rapidformer": run_rapidformer,
    "rapidformer --compile": lambda *args: run_rapidformer(*args, compile=True),
}


def measure(name: str, work: Workload, steps: int) -> dict[str, float]:
    rows = work.make_rows(work.batch * (WARM_UP + steps))
    timed = rows[WARM_UP * work.batch :]
    tokens = sum(len(row["input_ids"]) for row in timed)
    targets = sum(len(row["labels"]) for row in timed) if work.unit == "samples" else 0
    watch = Stopwatch()
    RUNS[name](work, rows, watch)
    watch.stop()
    memory = torch.cuda.max_memory_allocated() if HAS_GPU else 0
    seconds = watch.stopped - watch.started
    with torch.device("meta"):
        model = add_lora(work.build(), work.lora_rank)
    operations = count_work(model).count(tokens=tokens, targets=targets, rows=len(timed))
    return {
        "rate": (len(timed) if work.unit == "samples" else tokens) / seconds,
        "mfu": operations / seconds / measure_matrix_rate(DEVICE, DTYPE),
        "memory": memory / 2**30,
        "first step": watch.first_step,
    }


def start(name: str, workload: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run in a new process; an error or a run that takes too long is a result as well."""
    command = [sys.executable, __file__, "--only", name, "--workloads", workload]
    command += ["--steps", str(options.steps), "--size", options.size]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=options.limit
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"not done after {options.limit} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        return {"problem": (done.stderr.strip().splitlines() or ["no output"])[-1][:80]}
    return dict(json.loads(found[0].removeprefix("RESULT ")))


def format_line(name: str, result: dict[str, Any], base: float | None) -> str:
    if "problem" in result:
        return f"| {name} | {result['problem']} | | | | |"
    rate = result["rate"]
    shown = f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.1f}"
    ratio = f"{rate / base:.2f} x" if base else ""
    return (
        f"| {name} | {shown} | {ratio} | {result['mfu']:.1%} | {result['memory']:.1f} GiB "
        f"| {result['first step']:.1f} s |"
    )


def draw(results: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Bars relative to Hugging Face's Trainer, one group per workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5))
    names = list(dict.fromkeys(name for runs in results.values() for name in runs))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places, heights = [], []
        for place, runs in enumerate(results.values()):
            base, rate = runs.get("HF Trainer", {}).get("rate"), runs.get(name, {}).get("rate")
            if base and rate:
                places.append(place + (number - len(names) / 2 + 0.5) * width)
                heights.append(rate / base)
        bars = axes.bar(places, heights, width, label=name)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(results)), list(results))
    axes.set_ylabel("speed relative to HF Trainer")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("full", "tiny"), default="full" if HAS_GPU else "tiny")
    parser.add_argument("--workloads", nargs="+", choices=list_workloads("tiny"))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, default=30 if HAS_GPU else 3)
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds for one run")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--only", choices=RUNS)
    options = parser.parse_args()
    workloads = list_workloads(options.size)
    names = options.workloads or list(workloads)
    if options.only:
        result = measure(options.only, workloads[names[0]], options.steps)
        print("RESULT " + json.dumps(result))
        return
    rate = measure_matrix_rate(DEVICE, DTYPE) / 1e12
    device = torch.cuda.get_device_name() if HAS_GPU else "CPU"
    print(f"{device}, torch {torch.__version__}, {rate:.1f} TFLOP/s in {DTYPE}", flush=True)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for workload in names:
        unit = workloads[workload].unit
        print(f"\n| {workload} (goal: {workloads[workload].goal or '-'}) | {unit}/s | speed | MFU "
              "| memory | first step |\n|---|---|---|---|---|---|", flush=True)  # fmt: skip
        results[workload] = {}
        for name in options.runs:
            results[workload][name] = result = start(name, workload, options)
            base = results[workload].get("HF Trainer", {}).get("rate")
            print(format_line(name, result, base), flush=True)
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    main()
