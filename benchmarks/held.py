"""Models that no other benchmark names, with lengths as in real data: most rows short, a few long.

    python benchmarks/held.py [--size tiny] [--models vit ...] [--runs "HF Trainer" ...]
        [--together 6] [--steps 8] [--limit 120] [--json FILE] [--logs FOLDER]

rapidformer with its defaults, then with --compile, beside Hugging Face's Trainer, or what --runs
names, as in ``peers.py``: each run in its own process, data loading included, the first steps
excluded, padding not counted, the same weights and rows. The loss is the mean over all steps.

With --first-steps, only first steps are timed: without --compile, with it and empty caches, and
with it again, one process after the other.

With --together, that many runs warm up side by side and are then timed one after the other, while
the others wait. It saves minutes, but first steps then share the processor.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from held_models import HELD, UNITS
from peers import HAS_GPU, RUNS, WARM_UP, Result, Stopwatch, get_peak

NAMES = ("HF Trainer", "rapidformer", "rapidformer --compile")


def count_units(kind: str, row: dict[str, Any]) -> int:
    """Images or recordings, or tokens of both sides."""
    if kind in UNITS:
        return 1
    return len(row["input_ids"]) + (len(row["labels"]) if kind == "pairs" else 0)


def measure(
    name: str,
    model: str,
    size: str,
    steps: int,
    warm_up: int,
    profiles: bool,
    take_turn: Callable[[], object],
) -> Result:
    held = HELD[model]
    work = held.build_workload(size)
    rows = work.make_rows(work.batch * (warm_up + steps))
    timed = range(warm_up * work.batch, len(rows))
    units = sum(count_units(held.kind, rows[number]) for number in timed)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def begin() -> None:
        take_turn()
        if profiles:
            profile.start()

    watch = Stopwatch(warm_up, begin)
    RUNS[name](work, rows, watch)
    watch.stop()
    if profiles:
        profile.stop()
        print(profile.key_averages().table("self_device_time_total", row_limit=30))
    return {
        "rate": (watch.tokens or units) / (watch.stopped - watch.started),
        "unit": work.unit,
        "memory": get_peak(watch),
        "first step": watch.first_step,
        "loss": watch.loss,
    }


def run_together(
    jobs: list[tuple[str, str]], options: argparse.Namespace, folder: Path | None
) -> list[Result]:
    """Warm up side by side, then time one after the other; a problem is a result as well."""
    context: Any = multiprocessing.get_context("fork")
    runs = []
    for model, name in jobs:
        here, there = context.Pipe()
        file = re.sub(r"[^A-Za-z0-9.]+", "-", f"{model} {name}.txt")
        log = os.devnull if folder is None else str(folder / file)
        sizes = (options.size, options.steps, options.warm_up)
        is_profiled = model in options.profile and name != "HF Trainer"
        arguments = (name, model, *sizes, is_profiled)
        process = context.Process(target=_work, args=(there, log, arguments))
        process.start()
        there.close()
        runs.append((process, here))
    ends = time.monotonic() + options.limit
    results: list[Result | None] = [_receive(pipe, ends, options.limit) for _, pipe in runs]
    for number, (process, pipe) in enumerate(runs):
        if results[number] == {}:  # it is ready
            pipe.send("go")
            results[number] = _receive(pipe, time.monotonic() + options.limit, options.limit)
        process.kill()
        process.join()
    return [result or {} for result in results]


def time_first_steps(model: str, options: argparse.Namespace) -> str:
    """A row of the table, in seconds."""
    options.steps = options.warm_up = 1
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton")
        for name in (NAMES[1], NAMES[2], NAMES[2]):
            (result,) = run_together([(model, name)], options, options.logs)
            cells.append(result.get("problem") or f"{result['first step']:.1f}")
    return f"| {model} | {' | '.join(cells)} |"


def _receive(pipe: Connection, ends: float, limit: int) -> Result:
    if not pipe.poll(max(0.0, ends - time.monotonic())):
        return {"problem": f"not done after {limit} s"}
    try:
        return dict(pipe.recv())
    except EOFError:
        return {"problem": "crashed"}


def _work(pipe: Connection, log: str, arguments: tuple[Any, ...]) -> None:
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(target, stream.fileno())

    def take_turn() -> None:
        pipe.send({})
        pipe.recv()

    try:
        pipe.send(measure(*arguments, take_turn))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        pipe.send({"problem": text[:80].replace("|", "/")})


def format_row(model: str, runs: dict[str, Result], names: Sequence[str]) -> str:
    base = runs.get("HF Trainer", {}).get("rate")
    cells = []
    for name in names:
        result = runs.get(name, {"problem": "-"})
        if "problem" in result:
            cells.append(result["problem"])
            continue
        rate = result["rate"]
        shown = f"{rate / 1000:.1f}k" if rate >= 10000 else f"{rate:,.0f}"
        ratio = f" ({rate / base:.1f} x)" if base and name != "HF Trainer" else ""
        cells.append(
            f"{shown}{ratio}, {result['memory']:.1f} GiB, {result['first step']:.1f} s, "
            f"loss {result['loss']:.3f}"
        )
    held = HELD[model]
    lengths = "" if held.lengths == (1, 1) else f", {held.lengths[0]}-{held.lengths[1]}"
    return f"| {model}, {held.batch}{lengths} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("full", "tiny"), default="full" if HAS_GPU else "tiny")
    parser.add_argument("--models", nargs="+", choices=HELD, default=list(HELD))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=NAMES)
    parser.add_argument("--steps", type=int, default=64 if HAS_GPU else 3)
    parser.add_argument("--warm-up", type=int, default=4 * WARM_UP if HAS_GPU else 2)
    parser.add_argument("--limit", type=int, default=120, help="seconds for a warm-up")
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--first-steps", action="store_true")
    parser.add_argument("--json", type=Path, help="keep the figures there; what it has is not run")
    parser.add_argument("--logs", type=Path, help="what each run prints")
    parser.add_argument(
        "--profile", nargs="+", choices=HELD, default=[],
        help="print the kernels of the timed steps of rapidformer's runs, which it slows down",
    )  # fmt: skip
    options = parser.parse_args()
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    if options.first_steps:
        print("| model | uncompiled | empty caches | the same again |\n|---|---|---|---|")
        for model in options.models:
            print(time_first_steps(model, options), flush=True)
        return
    kept = options.json and options.json.exists()
    results: dict[str, dict[str, Result]] = json.loads(options.json.read_text()) if kept else {}
    jobs = [
        (model, name)
        for model in options.models
        for name in options.runs
        if "rate" not in results.setdefault(model, {}).get(name, {})
    ]
    for start in range(0, len(jobs), options.together):
        group = jobs[start : start + options.together]
        found = run_together(group, options, options.logs)
        for (model, name), result in zip(group, found, strict=True):
            results[model][name] = result
            print(f"{model}, {name}: {result}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    names = options.runs
    print(f"\n| model, batch, row lengths | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for model in options.models:
        print(format_row(model, results[model], names))


if __name__ == "__main__":
    main()
