"""Loss curves of rapidformer laid over those of a plain PyTorch loop, for every workload.

    python benchmarks/loss_curves.py [--workloads bert-16 gpt2] [--steps 300] [--picture FILE]

All runs of a workload start from the same weights and see the same batches. The reference is an
uncompiled loop in bf16 with three seeds. A seed decides what dropout draws, and the order of the
rows within a batch, which changes rounding only. rapidformer runs with --mixed-precision, then with
--compile as well, and on a GPU Llama also with --fp8. In fp32, without dropout, one run of each is
compared, and the reference with itself when the rows of its batches come in another order.

Printed for each workload: the largest distance of rapidformer's curve from the mean of the
reference, next to that of a reference seed from the mean of the other seeds (bf16, running means
over ``WINDOW`` steps), and the largest relative distances in fp32. A model without dropout differs
from seed to seed by the rounding of a few sums only, so a second table shows how far each run in
bf16 is from the reference in fp32. Each run has its own process, forked from one that has imported
everything and never touches the GPU. Several share the GPU, since time is not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# bf16 on any CPU.
os.environ["RAPIDFORMER_EMULATE_16_BIT"] = "1"

import numpy as np
import torch
from peers import COMPILED, DEVICE, HAS_GPU, Result, call
from torch import nn
from workloads import Rows, Workload, add_lora, list_workloads

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.data.collate import PadCollator
from rapidformer.training.callbacks import Callback

LEARNING_RATE = 2e-5
MOST_TOKENS, LONGEST_ROW = 4096, 256
"""Of a step and of a row: a curve needs no large batches."""
LARGE = 10**9
"""Models with more weights than this get an eighth of the tokens, and fewer steps in fp32."""
WINDOW = 10
SEEDS = ("reference 1", "reference 2", "reference 3")
OURS = ("rapidformer", "rapidformer --compile")
IN_FP8 = "rapidformer --compile --fp8"
IN_FP32 = ("reference fp32", "rapidformer fp32", "reference fp32, reordered")
NAMES = (*reversed(OURS), *IN_FP32, *SEEDS)
"""The runs of every workload, the slowest first."""
MOST_RUNS = max(1, (os.cpu_count() or 1) // 2)
"""At a time; each needs a core, and more to load its data."""
LIMIT = 1e-5
"""The largest relative distance in fp32."""

Curves = dict[str, list[float]]


def build_model(work: Workload, *, has_dropout: bool) -> nn.Module:
    """The same weights in every process, created on the device."""
    torch.manual_seed(1)
    with DEVICE:
        model = add_lora(work.build(), work.lora_rank)
    for module in model.modules() if not has_dropout else ():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # T5's attention reads this one
    return model


def list_runs(workload: str) -> tuple[str, ...]:
    return (*NAMES, IN_FP8) if HAS_GPU and workload == "llama1b" else NAMES


def count_weights(work: Workload) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in work.build().parameters())


def shorten(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v[:LONGEST_ROW] if isinstance(v, list) else v for k, v in row.items()}


def make_batches(work: Workload, steps: int, seed: int) -> list[Rows]:
    """One per step; the seed decides the order of the rows within a batch."""
    tokens = MOST_TOKENS // 8 if count_weights(work) > LARGE else MOST_TOKENS
    batch = list(map(shorten, work.make_rows(work.batch)))
    size = min(len(batch), tokens * len(batch) // sum(len(row["input_ids"]) for row in batch))
    rows = list(map(shorten, work.make_rows(size * steps)))
    order = np.random.default_rng(seed)
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [[batch[i] for i in order.permutation(size)] for batch in batches]


def run_reference(model: nn.Module, batches: list[Rows], *, is_bf16: bool) -> Iterator[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    collate = PadCollator()
    losses = []
    model.train()
    for rows in batches:
        batch = {name: value.to(DEVICE) for name, value in collate(rows).items()}
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=is_bf16):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return map(float, losses)


def run_rapidformer(model: nn.Module, batches: list[Rows], **more: Any) -> list[float]:
    losses: list[float] = []

    class Record(Callback):
        def on_log(self, loop: Any, control: Any, line: dict[str, Any]) -> None:
            if "loss" in line:
                losses.append(line["loss"])

    class Run(Finetuner):
        callbacks = (Record(),)

        def train_valid_test_datasets_provider(self) -> Any:
            return [row for rows in batches for row in rows], None, None, None

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            return model, None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            return model(**batch).loss

    settings: dict[str, Any] = {
        "micro_batch_size": len(batches[0]), "epochs": 1, "lr": LEARNING_RATE, "weight_decay": 0.0,
        "lr_decay_style": "constant", "clip_grad": 1.0, "log_interval": 1, "save": "none",
        "dataloader_type": "single", "log_level": "error", "progress": False,
    }  # fmt: skip
    Run(RapidformerEngine(args={**settings, **more})).train()
    return losses


def run_one(name: str, workload: str, size: str, steps: int) -> Result:
    """Called in the run's own process."""
    return {"losses": record_losses(name, list_workloads(size)[workload], steps)}


def record_losses(name: str, work: Workload, steps: int) -> list[float]:
    seed = SEEDS.index(name) + 1 if name in SEEDS else int(name == IN_FP32[2])
    batches = make_batches(work, steps, seed)
    model = build_model(work, has_dropout=name not in IN_FP32)
    if name.startswith("reference"):
        torch.manual_seed(seed)
        return list(run_reference(model, batches, is_bf16=name in SEEDS))
    more: dict[str, Any] = {} if name in IN_FP32 else {"mixed_precision": "bf16"}
    more |= COMPILED if "--compile" in name else {}
    more |= {"fp8": True} if name == IN_FP8 else {}
    return run_rapidformer(model, batches, **more)


def start(name: str, workload: str, size: str, steps: int) -> list[float]:
    """The losses of one run, which gets a new process; none if it fails."""
    result = call("forkserver", None, run_one, name, workload, size, steps)
    if "problem" in result:
        print(f"{workload}: {name} failed: {result['problem']}", flush=True)
    return result.get("losses", [])


def smooth(losses: list[float]) -> np.ndarray:
    window = min(WINDOW, len(losses))
    return np.convolve(losses, np.ones(window) / window, mode="valid")


def measure_distance(curve: np.ndarray, others: list[np.ndarray]) -> float:
    """The largest distance from the mean of the others."""
    return float(np.abs(curve - np.mean(others, axis=0)).max())


def compare(curves: Curves) -> dict[str, float]:
    """The distances that the table shows; without those of runs that failed."""
    seeds = [smooth(curves[name]) for name in SEEDS if curves.get(name)]
    found = {}
    if len(seeds) > 1:
        rest = [[other for other in seeds if other is not seed] for seed in seeds]
        found["spread"] = max(map(measure_distance, seeds, rest))
        ours = (*OURS, IN_FP8)
        found |= {n: measure_distance(smooth(curves[n]), seeds) for n in ours if curves.get(n)}
    expected = np.array(curves.get(IN_FP32[0], []))
    for name in IN_FP32[1:] if len(expected) else ():
        if curves.get(name):
            found[name] = float(np.max(np.abs(np.array(curves[name]) / expected - 1)))
    return found


def format_line(workload: str, found: dict[str, float]) -> str:
    spread = found.get("spread")
    cells = [workload, "missing" if spread is None else f"{spread:.2e}"]
    for name in (*OURS, IN_FP8):
        distance = found.get(name)
        if name not in list_runs(workload):
            cells.append("")
        elif spread is None or distance is None:
            cells.append("missing")
        else:
            ratio = f" ({distance / spread:.2f} x)" if spread else ""
            cells.append(f"{distance:.2e}{ratio}")
    for name in IN_FP32[1:]:
        distance = found.get(name, math.inf)
        limit = f", above {LIMIT:.0e}" if distance >= LIMIT else ""
        cells.append(f"{distance:.1e}{limit}" if name in found else "missing")
    return "| " + " | ".join(cells) + " |"


def has_dropout(work: Workload) -> bool:
    with torch.device("meta"):
        return any(isinstance(m, nn.Dropout) and m.p > 0 for m in work.build().modules())


def format_rounding(workload: str, curves: Curves) -> str:
    """The root mean square of each bf16 run's distance from the reference in fp32."""
    exact = np.array(curves.get(IN_FP32[0], []))
    cells = [workload]
    for name in (*SEEDS, *OURS, IN_FP8):
        losses = curves.get(name, [])[: len(exact)]
        missing = "missing" if name in list_runs(workload) else ""
        rms = np.sqrt(np.mean((np.array(losses) - exact[: len(losses)]) ** 2)) if losses else None
        cells.append(missing if rms is None else f"{rms:.2e}")
    return "| " + " | ".join(cells) + f" | {len(exact)} |"


STYLES = (
    (OURS[0], "tab:blue", "-"),
    (OURS[1], "tab:orange", "--"),
    (IN_FP8, "tab:green", ":"),
)


def draw(results: dict[str, Curves], path: Path) -> None:
    """One panel per workload: the range of the reference's seeds, and our curves over it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(results))
    lines = -(-len(results) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(4.2 * columns, 3.2 * lines), squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(results) :]:
        axes.set_visible(False)
    for axes, (workload, curves) in zip(grid.flat, results.items(), strict=False):
        seeds = [smooth(curves[name]) for name in SEEDS if curves.get(name)]
        if seeds:
            steps = np.arange(len(seeds[0])) + WINDOW
            low, high = np.min(seeds, axis=0), np.max(seeds, axis=0)
            axes.fill_between(steps, low, high, color="0.8", label="reference, range of 3 seeds")
            axes.plot(steps, np.mean(seeds, axis=0), color="0.45", label="reference, mean")
        for name, color, style in STYLES:
            if curves.get(name):
                smoothed = smooth(curves[name])
                steps = np.arange(len(smoothed)) + WINDOW
                axes.plot(steps, smoothed, style, color=color, linewidth=1.2, label=name)
        axes.set_title(workload, fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
    legend = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend), fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def estimate_memory(weights: int) -> int:
    """Bytes of the device that a run may take: its states, a quarter more, and some for CUDA."""
    return 20 * weights + 6 * 2**30


class Room:
    """The device's memory: a run waits until there is enough; a CPU takes one run at a time."""

    def __init__(self) -> None:
        self._free = torch.cuda.mem_get_info()[0] if HAS_GPU else 0
        self._running = 0
        self._changed = threading.Condition()

    @contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(size))
            self._take(size, 1)
        try:
            yield
        finally:
            with self._changed:
                self._take(-size, -1)
                self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        return self._running == 0 or (self._free >= size and self._running < MOST_RUNS)

    def _take(self, size: int, runs: int) -> None:
        self._free -= size
        self._running += runs


def run_missing(
    results: dict[str, Curves], chosen: Sequence[str], options: argparse.Namespace
) -> Iterator[tuple[str, str, list[float]]]:
    """The runs that have no losses yet, as many at a time as fit; each is given when it is done."""
    workloads = list_workloads(options.size)
    # Here, not in the threads: building a model changes global settings for a moment.
    weights = {workload: count_weights(workloads[workload]) for workload in chosen}
    room = Room()

    def run(workload: str, name: str) -> tuple[str, str, list[float]]:
        is_short = name in IN_FP32 and weights[workload] > LARGE
        steps = min(options.steps, options.fp32_steps) if is_short else options.steps
        with room.reserved(estimate_memory(weights[workload])):
            return workload, name, start(name, workload, options.size, steps)

    with ThreadPoolExecutor(sum(len(list_runs(workload)) for workload in chosen)) as pool:
        runs = [
            pool.submit(run, workload, name)
            for workload in chosen
            for name in list_runs(workload)
            if not results[workload].get(name)
        ]
        for done in as_completed(runs):
            yield done.result()


def describe(options: argparse.Namespace) -> dict[str, str | int]:
    """What all curves of one file must have in common."""
    return {
        "device": torch.cuda.get_device_name() if HAS_GPU else "CPU",
        "size": options.size,
        "steps": options.steps,
        "fp32 steps": options.fp32_steps,
    }


def load(path: Path | None, setup: dict[str, str | int]) -> dict[str, Curves]:
    """The losses of earlier calls; exits if they were recorded with another setup."""
    if not path or not path.exists():
        return {}
    kept = json.loads(path.read_text())
    differing = [
        f"{name}: {kept.get(name, 'not recorded')} there, {value} here"
        for name, value in setup.items()
        if kept.get(name) != value
    ]
    if differing:
        sys.exit(
            f"{path} holds curves of another setup ({'; '.join(differing)}). "
            "Repeat the options they were recorded with, or choose another file."
        )
    return dict(kept["workloads"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("full", "tiny"), default="full" if HAS_GPU else "tiny")
    parser.add_argument("--workloads", nargs="+", choices=list_workloads("tiny"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--fp32-steps", type=int, default=300, help="of the large models, which are slow in fp32"
    )
    parser.add_argument("--picture", type=Path)
    parser.add_argument(
        "--json", type=Path, help="keep the losses there; what it has is not run again"
    )
    options = parser.parse_args()
    chosen = options.workloads or list(list_workloads(options.size))
    setup = describe(options)
    kept = load(options.json, setup)
    described = ", ".join(f"{name} {value}" for name, value in setup.items())
    print(f"torch {torch.__version__}, {described}")
    ours = " | ".join((*OURS, "--fp8"))
    print(f"\n| workload | reference's spread | {ours} | {' | '.join(IN_FP32[1:])} |")
    print("|---|---|---|---|---|---|---|", flush=True)
    results = {workload: kept.get(workload, {}) for workload in {**dict.fromkeys(chosen), **kept}}
    for workload, name, losses in run_missing(results, chosen, options):
        results[workload] = {**results[workload], name: losses}
        if options.json:
            options.json.write_text(json.dumps({**setup, "workloads": results}))
    for workload, curves in results.items():
        print(format_line(workload, compare(curves)))
    workloads = list_workloads(options.size)
    undisturbed = [workload for workload in results if not has_dropout(workloads[workload])]
    if undisturbed:
        print("\nWithout dropout: distance of bf16 from fp32, root mean square over the steps.")
        print(f"| workload | {' | '.join((*SEEDS, *OURS, '--fp8'))} | steps |")
        print("|---|---|---|---|---|---|---|---|")
    for workload in undisturbed:
        print(format_rounding(workload, results[workload]))
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    main()
