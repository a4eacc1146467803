"""Does a run fit? `rapidformer plan` against trainings under a limit of memory.

    python benchmarks/plan_limits.py --json FILE [--runs lora ...] [--seconds 240] [--predict]

Each run is trained twice, for three steps: under the smallest limit that plan says it fits, and
under one that plan says is too small by 5 %. The limit is that of
`torch.cuda.set_per_process_memory_fraction`, less what a process takes outside of torch's
allocator. Each training has a process of its own.

What the file already has is not run again, and no run is started after `--seconds`. `--predict`
only asks plan, on any machine; otherwise what the file lacks is predicted first.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peers import HAS_GPU, Result, call
from plan_memory import COMPILED, FULL, Run, build_planner, train

from rapidformer.planning.devices import GIB, Cluster, parse_devices
from rapidformer.planning.parts import SPARE

LIMIT = 120
"""Seconds for one training."""
STEPS = (1, 2)
TOO_SMALL = 1.05
"""How many times the limit that does not fit the least memory of a run is."""
WHOLE = {"fused_loss": "off"}
RUNS: dict[str, Run] = {
    "llama1b, batch 2": Run("llama1b", 2),
    "llama1b": Run("llama1b", 4),
    "llama1b, loss not fused": Run("llama1b", 2, WHOLE),
    "llama1b, recompute": Run("llama1b", 4, FULL),
    "lora": Run("lora", 4),
    "bert-large": Run("bert-large, one length", 256),
    "gpt2, loss not fused": Run("gpt2", 13, WHOLE),
    "qwen3-0.6b, loss not fused": Run("qwen3-0.6b", 4, WHOLE),
    "llama1b, activations offloaded": Run("llama1b", 4, {"activation_offload": True}),
    "llama1b, compile": Run("llama1b", 4, COMPILED),
}


def predict(name: str, size: str) -> Result:
    """What plan says of a run on a device that it fills, in GiB."""
    device = replace(parse_devices("H200").device, memory=1e-3)
    memory = build_planner(RUNS[name], size, Cluster(device)).plan().prediction.memory
    found = {key: getattr(memory, key) / GIB for key in ("allocated", "overhead", "least", "total")}
    limits = {
        "does not fit": memory.least / TOO_SMALL,
        "fits": memory.total / (1 - SPARE) + GIB / 64,
    }
    for verdict, limit in limits.items():
        assert memory.judge(limit) == verdict
    return found | {"limits": {verdict: limit / GIB for verdict, limit in limits.items()}}


def try_limits(name: str, size: str, predicted: Result) -> Result:
    """Whether the run fits each limit."""
    return {
        verdict: call("fork", LIMIT, try_once, RUNS[name], size, limit - predicted["overhead"])
        for verdict, limit in predicted["limits"].items()
    }


def try_once(run: Run, size: str, limit: float) -> Result:
    began = time.perf_counter()
    if HAS_GPU:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(limit * GIB / total)
    try:
        result = train(run, size, STEPS)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        outcome = "does not fit" if "out of memory" in str(error).lower() else "problem"
        return {"outcome": outcome, "text": text, "seconds": time.perf_counter() - began}
    peaks = {key: result[key] / GIB for key in ("peak allocated", "peak reserved") if key in result}
    return {"outcome": "fits", "seconds": time.perf_counter() - began, **peaks}


def show(name: str, predicted: Result, found: Result) -> tuple[list[str], int]:
    """Lines of the table, and how many of them went as predicted."""
    lines, right = [], 0
    for verdict, result in found.items():
        if "problem" in result:
            result = {"outcome": "problem", "text": result["problem"]}
        right += result["outcome"] == verdict
        peak = f"{result['peak allocated']:.1f}" if "peak allocated" in result else ""
        outcome = result["outcome"] if result["outcome"] != "problem" else result["text"]
        lines.append(
            f"| {name} | {predicted['limits'][verdict]:.1f} | {verdict} | {outcome} "
            f"| {predicted['allocated']:.1f} | {peak} |"
        )
    return lines, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("full", "tiny"))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--json", type=Path, required=True, help="keep the figures there")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--predict", action="store_true", help="train nothing")
    options = parser.parse_args()
    size = options.size or ("full" if HAS_GPU or options.predict else "tiny")
    kept: Result = {"predicted": {}, "found": {}}
    if options.json.exists():
        kept = json.loads(options.json.read_text())

    def keep(part: str, name: str, result: Result) -> None:
        kept[part][name] = result
        options.json.write_text(json.dumps(kept, indent=1) + "\n")

    began = time.perf_counter()
    for name in options.runs:
        if name not in kept["predicted"]:
            keep("predicted", name, call("fork", LIMIT, predict, name, size))
            print(f"{name}: {kept['predicted'][name]}", flush=True)
    if options.predict:
        return
    for name in options.runs:
        predicted: dict[str, Any] = kept["predicted"][name]
        has_time = time.perf_counter() - began < options.seconds
        if has_time and name not in kept["found"] and "problem" not in predicted:
            keep("found", name, try_limits(name, size, predicted))
            seconds = time.perf_counter() - began
            print(f"{seconds:.0f} s: {name}: {kept['found'][name]}", flush=True)
    print("\n| run | limit, GiB | predicted | outcome | allocated: predicted | measured |")
    print("|---|---|---|---|---|---|")
    right = count = 0
    for name, found in kept["found"].items():
        lines, good = show(name, kept["predicted"][name], found)
        print("\n".join(lines))
        right, count = right + good, count + 2
    print(f"right: {right} of {count}")


if __name__ == "__main__":
    main()
