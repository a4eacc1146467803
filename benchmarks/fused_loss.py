"""Time and memory of the loss over a large vocabulary, with and without ``--fused-loss``.

    python benchmarks/fused_loss.py [--tokens 2048] [--words 50304] [--width 768] [--labelled 1.0]

Forward and backward pass of head and loss alone, each in its own process, alternating three times;
the best time counts. ``--labelled 0.15`` is masked language modelling: other labels are ignored.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional

from rapidformer.accel.fused_loss.fused_loss import apply_fused_loss


def measure(args: argparse.Namespace) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    head = nn.Linear(args.width, args.words, bias=False, device=device)
    hidden = torch.randn(args.tokens, args.width, device=device, requires_grad=True)
    labels = torch.randint(args.words, (args.tokens,), device=device)
    labels[torch.rand(args.tokens, device=device) >= args.labelled] = -100
    if args.mode == "fused":
        apply_fused_loss(head)
    before = read_memory(device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = functional.cross_entropy(head(hidden).float(), labels)
        loss.backward()
        head.weight.grad = hidden.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"seconds": min(times), "mib": (read_memory(device) - before) / 2**20}


def read_memory(device: torch.device) -> float:
    """The peak so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--words", type=int, default=50304)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--labelled", type=float, default=1.0)
    parser.add_argument("--mode", choices=["plain", "fused"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(measure(args)))
        return
    found: dict[str, list[dict[str, float]]] = {"plain": [], "fused": []}
    for _ in range(3):
        for mode, results in found.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode]
            results.append(
                json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            )
    best = {mode: min(results, key=lambda r: r["seconds"]) for mode, results in found.items()}
    for mode, result in best.items():
        print(f"{mode:6} {result['seconds'] * 1e3:9.1f} ms  {result['mib']:9.0f} MiB")
    faster = best["plain"]["seconds"] / best["fused"]["seconds"]
    smaller = best["plain"]["mib"] / best["fused"]["mib"]
    print(f"fused: {faster:.2f}x as fast, {smaller:.1f}x less memory")


if __name__ == "__main__":
    main()
