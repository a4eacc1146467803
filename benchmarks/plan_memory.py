"""`rapidformer plan` against real trainings: peak memory, the bytes of its parts, time of a step.

    python benchmarks/plan_memory.py --json FILE [--runs gpt2 "gpt2, recompute"] [--seconds 190]
    python benchmarks/plan_memory.py --json FILE --predict
    python benchmarks/plan_memory.py --json FILE --table

The first trains on the GPU: each run is a training by the engine in a process of its own, as in
`peers.py`; what the file already has is not run again, and none is started after `--seconds`.
`--predict` asks plan about all runs, on any machine. `--table` compares, in Markdown. Whether a
run fits is tried by `plan_limits.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peers import DEVICE, HAS_GPU, Result, Stopwatch, call, describe_device
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from workloads import LORA_TARGETS, Workload, list_workloads, make_pair_rows, make_text_rows

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.config import Settings, resolve
from rapidformer.planning.devices import GIB, Cluster, parse_devices
from rapidformer.planning.measure import measure
from rapidformer.planning.search import Planner
from rapidformer.training.callbacks import Callback

LIMIT = 100
"""Seconds for one run."""


@dataclass(frozen=True)
class Run:
    """A training: one of the workloads of `workloads.py`, with switches."""

    workload: str
    batch: int
    settings: dict[str, Any] = field(default_factory=dict)


FULL = {"recompute_granularity": "full"}
COMPILED = {"compile": True}
RUNS: dict[str, Run] = {
    "bert-16": Run("bert-16", 16),
    "bert-64": Run("bert-64", 64),
    "gpt2, batch 8": Run("gpt2", 8),
    "gpt2": Run("gpt2", 32),
    "gpt2, recompute": Run("gpt2", 32, FULL),
    "llama1b, batch 2": Run("llama1b", 2),
    "llama1b": Run("llama1b", 4),
    "llama1b, recompute": Run("llama1b", 4, FULL),
    "llama1b, activations offloaded": Run("llama1b", 4, {"activation_offload": True}),
    "lora, batch 2": Run("lora", 2),
    "lora": Run("lora", 4),
    "lora, recompute": Run("lora", 4, FULL),
    "t5-3b, batch 4": Run("t5-3b", 4),
    "t5-3b": Run("t5-3b", 8),
    "t5-3b, recompute": Run("t5-3b", 8, FULL),
    "llama1b, compile": Run("llama1b", 4, COMPILED),
    "llama1b, compile, fp8": Run("llama1b", 4, {"compile": True, "fp8": True}),
    "gpt2, compile": Run("gpt2", 32, COMPILED),
    "lora, compile": Run("lora", 4, COMPILED),
    "bert-64, compile": Run("bert-64", 64, COMPILED),
    "gpt2, loss not fused": Run("gpt2", 8, {"fused_loss": "off"}),
    "llama1b, bf16 moments": Run("llama1b", 4, {"optimizer_state_dtype": "bf16"}),
    "gpt2, CPU offload": Run("gpt2", 8, {"cpu_offload": True}),
    "bert-64, padded": Run("bert-64", 64, {"dynamic_shape": "off"}),
    "llama1b, selective": Run("llama1b", 4, {"recompute_granularity": "selective"}),
    "t5-3b, compile": Run("t5-3b", 8, COMPILED),
    "bert-large": Run("bert-large", 32),
    "gpt2-medium": Run("gpt2-medium", 8),
    "gpt2-medium, compile": Run("gpt2-medium", 8, COMPILED),
    "qwen3-0.6b": Run("qwen3-0.6b", 4),
    "qwen3-0.6b, recompute": Run("qwen3-0.6b", 8, FULL),
    "llama3b": Run("llama3b", 1),
}
HELD = ("bert-large", "gpt2-medium", "qwen3-0.6b", "llama3b")
"""Models that nothing in plan was fitted to."""
STEPS = {
    "bert-16": (60, 60), "bert-64": (60, 60), "bert-large": (60, 60),
    "gpt2": (8, 10), "gpt2-medium": (8, 10),
}  # fmt: skip
"""Steps before the clock starts, and timed ones; (4, 4) for others."""


def list_every_workload(size: str) -> dict[str, Workload]:
    """Those of `workloads.py` and the held-out ones."""
    is_tiny = size == "tiny"
    llama: dict[str, Any] = {"hidden_size": 3072, "num_hidden_layers": 28, "vocab_size": 128256}
    llama |= {"num_attention_heads": 24, "num_key_value_heads": 8, "intermediate_size": 8192}
    qwen: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 28, "vocab_size": 151936}
    qwen |= {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}
    small: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"intermediate_size": 128}
    bert = small if is_tiny else {"hidden_size": 1024, "num_hidden_layers": 24,
                                  "num_attention_heads": 16, "intermediate_size": 4096}  # fmt: skip
    medium = (64, 2, 4) if is_tiny else (1024, 24, 16)
    if is_tiny:
        llama |= small | {"num_key_value_heads": 2, "vocab_size": 512}
        qwen |= small | {"num_key_value_heads": 2, "vocab_size": 512, "head_dim": 16}

    def write(length: int, vocabulary: int) -> Any:
        length, vocabulary = (32, 512) if is_tiny else (length, vocabulary)
        return lambda n: make_text_rows(n, length=length, vocabulary=vocabulary)

    def build_gpt2() -> Any:
        width, depth, heads = medium
        return GPT2LMHeadModel(
            GPT2Config(n_embd=width, n_layer=depth, n_head=heads, vocab_size=50304)
        )

    return list_workloads(size) | {
        "bert-large": Workload(
            build=lambda: BertForSequenceClassification(BertConfig(**bert)),
            make_rows=make_pair_rows, batch=32,
        ),
        "bert-large, one length": Workload(
            build=lambda: BertForSequenceClassification(BertConfig(**bert)),
            make_rows=lambda n: make_pair_rows(n, shortest=128, longest=128), batch=256,
        ),
        "gpt2-medium": Workload(build=build_gpt2, make_rows=write(1024, 50304), batch=8),
        "qwen3-0.6b": Workload(
            build=lambda: Qwen3ForCausalLM(Qwen3Config(**qwen, tie_word_embeddings=True)),
            make_rows=write(2048, 151936), batch=4,
        ),
        "llama3b": Workload(
            build=lambda: LlamaForCausalLM(LlamaConfig(**llama, tie_word_embeddings=True)),
            make_rows=write(4096, 128256), batch=1,
        ),
    }  # fmt: skip


def measure_device() -> Result:
    """Its rate of products, and what it copies in a second: within itself, and from the host."""
    found = describe_device()
    if HAS_GPU:
        there = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
        for key, source in {
            "bandwidth": torch.empty_like(there),
            "host link": torch.empty(2**30, dtype=torch.uint8, pin_memory=True),
        }.items():
            times = []
            for _ in range(6):
                torch.cuda.synchronize()
                began = time.perf_counter()
                there.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            found[key] = (2 if key == "bandwidth" else 1) * 2**30 / min(times)
    return found


def count_bytes(tensors: Any) -> int:
    """Of those on the device."""
    return sum(t.numel() * t.element_size() for t in tensors if t.device.type == DEVICE.type)


class Watch(Callback):
    """Times the steps, and reads the sizes where they are known."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.result: Result = {"gradients": 0}

    def on_step_begin(self, *_: Any) -> None:
        self.watch.begin_step()

    def on_step_end(self, loop: Any, *_: Any) -> None:
        if loop.step == 1 and HAS_GPU:
            self.result["peak of the first step"] = torch.cuda.max_memory_allocated()
            self.result["at rest"] = torch.cuda.memory_allocated()

    def on_train_end(self, loop: Any, *_: Any) -> None:
        self.watch.stop()
        model, optimizer = loop.engine.model.parallelized.model, loop.engine.updates.optimizer
        parameters = list(model.parameters())
        state = [v for each in optimizer.state.values() for v in each.values() if v.dim()]
        graphs = loop.engine.updates.graphs
        self.result |= {
            "weights": count_bytes(parameters),
            "buffers": count_bytes(model.buffers()),
            "gradients": count_bytes(p for p in parameters if p.requires_grad),
            "optimizer": count_bytes(state),
            "parameters": sum(p.numel() for p in parameters),
            "graphs": graphs.count if graphs is not None else 0,
            "work": asdict(loop.engine.model.work),
        }


def build_trainer(work: Workload, rows: Any, engine: Any, *watching: Callback) -> Finetuner:
    class Bench(Finetuner):
        callbacks = watching

        def train_valid_test_datasets_provider(self) -> Any:
            return rows, None, None, None

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            with DEVICE:
                return self.engine.build_model(work.build), None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            return model(**batch).loss

    return Bench(engine)


def train(run: Run, size: str, steps: tuple[int, int] | None = None) -> Result:
    """The figures of one training, with ``steps`` before the clock starts and after."""
    work = list_every_workload(size)[run.workload]
    usual = STEPS.get(run.workload, (4, 4)) if HAS_GPU else (2, 2)
    warm_up, timed = steps or usual
    rows = work.make_rows(run.batch * (warm_up + timed))
    watched = Watch(Stopwatch(warm_up))

    engine = RapidformerEngine(args=make_settings(run, size))
    began = time.perf_counter()
    try:
        build_trainer(work, rows, engine, watched).train()
    finally:
        engine.close()
    watch, counted = watched.watch, rows[warm_up * run.batch :]
    result = watched.result | {
        "seconds": time.perf_counter() - began,
        "step": (watch.stopped - watch.started) / timed,
        "first step": watch.first_step,
        "batch": run.batch,
        "tokens": sum(len(row["input_ids"]) for row in counted) / timed,
        "targets": sum(len(row["labels"]) for row in counted) / timed
        if work.unit == "samples"
        else 0,
        "longest": max(len(row["input_ids"]) for row in counted),
    }
    if HAS_GPU:
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        result |= {
            "peak allocated": torch.cuda.max_memory_allocated(),
            "peak reserved": torch.cuda.max_memory_reserved(),
            "outside the allocator": total - free - reserved,
        }
    return result


def make_settings(run: Run, size: str) -> dict[str, Any]:
    work = list_every_workload(size)[run.workload]
    settings: dict[str, Any] = {
        "micro_batch_size": run.batch, "epochs": 1, "lr": 2e-5, "log_interval": 1000,
        "dataloader_type": "single", "save": "none", "log_level": "error",
    }  # fmt: skip
    settings |= {"mixed_precision": "bf16"} if HAS_GPU else {}
    if work.lora_rank:
        settings |= {"lora_rank": work.lora_rank, "lora_target_modules": [LORA_TARGETS]}
    return settings | run.settings


def show(name: str, result: Result) -> str:
    if "problem" in result:
        return f"| {name} | {result['problem']} | | | | | | |"
    gib = (
        f"{result.get(key, 0) / GIB:.2f}"
        for key in ("peak allocated", "peak reserved", "weights", "optimizer")
    )
    times = f"{1000 * result['step']:.1f} ms | {result['first step']:.1f} s"
    return f"| {name} | {' | '.join(gib)} | {times} | {result['graphs']} |"


def measure_runs(kept: Result, options: argparse.Namespace) -> None:
    began = time.perf_counter()
    print("| run | allocated | reserved | weights | optimizer | step | first step | graphs |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.runs:
        if name not in kept["runs"] and time.perf_counter() - began < options.seconds:
            kept["runs"][name] = call("fork", LIMIT, train, RUNS[name], options.size)
            print(show(name, kept["runs"][name]), flush=True)
            save(kept, options)


# ---- predictions ---------------------------------------------------------------------------------


def build_planner(run: Run, size: str, cluster: Cluster) -> Planner:
    """What plan knows about a run on these devices."""
    work = list_every_workload(size)[run.workload]
    asked = make_settings(run, size) | {"mixed_precision": "bf16", "device": "cpu"}
    rows = work.make_rows(max(run.batch, 256 if run.workload.startswith("bert") else 2))
    given = asked | {"save": None}
    settings = resolve(Settings(**given), world_size=cluster.count)
    plain = {name: value for name, value in asked.items() if name not in run.settings}
    shape = measure(
        settings, lambda: build_trainer(work, rows, RapidformerEngine(args=plain)).train()
    )
    return Planner(shape, settings, cluster)


def predict_runs(kept: Result, options: argparse.Namespace) -> None:
    planners: dict[tuple[str, int], Planner] = {}
    cluster = parse_devices("H200")
    for name, run in RUNS.items():
        if name not in options.runs:
            continue
        key = (run.workload, run.batch)
        if key not in planners:
            planners[key] = build_planner(run, options.size, cluster)
        asked = make_settings(run, options.size) | {"mixed_precision": "bf16", "save": None}
        settings = resolve(Settings(**asked), world_size=1)
        planned = Planner(planners[key].shape, settings, cluster).plan()
        kept["predicted"][name] = {
            "allocated": planned.prediction.memory.allocated,
            "total": planned.prediction.memory.total,
            "weights": planned.prediction.memory.weights,
            "optimizer": planned.prediction.memory.optimizer,
            "step": planned.timing.step,
        }
        print(f"{name}: {planned.gib:.1f} GiB, {1000 * planned.timing.step:.1f} ms", flush=True)
    save(kept, options)


def compare(kept: Result) -> None:
    """The table of the docs."""
    print("| run | predicted | measured | error | step predicted | measured | error |")
    print("|---|---|---|---|---|---|---|")
    for name, found in kept["runs"].items():
        planned = kept["predicted"].get(name)
        if planned is None or "problem" in found:
            continue
        cells = []
        for key, source, unit, suffix in (
            ("allocated", "peak allocated", GIB, "GiB"), ("step", "step", 1e-3, "ms")
        ):  # fmt: skip
            ours, real = planned[key] / unit, found[source] / unit
            cells += [f"{ours:.1f} {suffix}", f"{real:.1f} {suffix}", f"{ours / real - 1:+.1%}"]
        held = " (held out)" if RUNS[name].workload in HELD else ""
        print(f"| {name}{held} | {' | '.join(cells)} |")


def save(kept: Result, options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("full", "tiny"))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--json", type=Path, help="keep the figures there; what it has is not run")
    parser.add_argument("--seconds", type=float, default=3600)
    for flag in ("--predict", "--table"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    options.size = options.size or ("full" if HAS_GPU or options.predict else "tiny")
    kept: Result = {"size": options.size, "runs": {}}
    if options.json and options.json.exists():
        kept = json.loads(options.json.read_text())
    kept = {"predicted": {}} | kept
    if options.predict:
        predict_runs(kept, options)
    if options.table:
        compare(kept)
    if options.predict or options.table:
        return
    device = call("fork", LIMIT, measure_device)
    if "problem" in device:
        sys.exit(f"the device cannot be used: {device['problem']}")
    kept.setdefault("device", device)
    print(
        f"{device['name']}, torch {torch.__version__}, {device['matrix rate'] / 1e12:.0f} TFLOP/s"
    )
    measure_runs(kept, options)


if __name__ == "__main__":
    main()
