"""``--fp8`` on one GPU: rounding errors per layer, losses next to bf16's, speed and memory.

    python benchmarks/gpu_fp8.py [--steps 20] [--size tiny]

First the forward and gradient products of Llama 1B's layers against fp32, then a few steps of
training with and without fp8, uncompiled and compiled. ``--size tiny`` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from workloads import Workload, list_workloads

from rapidformer import RapidformerEngine
from rapidformer.accel.fp8 import layers, product
from rapidformer.accel.precision.processor import EMULATE_VARIABLE
from rapidformer.data.collate import PadCollator

WARM_UP = 4
BATCHES = 8
LAYERS = {"attention": (2048, 2048), "up": (2048, 8192), "down": (8192, 2048)}
RUNS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"fp8": True},
    "bf16, compiled": {"compile": True},
    "fp8, compiled": {"fp8": True, "compile": True},
}


def print_layer_errors(device: torch.device, *, rows: int, divisor: int) -> None:
    """Relative errors of output, input gradient and weight gradient against fp32."""
    for name, (inputs, outputs) in LAYERS.items():
        torch.manual_seed(1)
        layer = nn.Linear(inputs // divisor, outputs // divisor, bias=False, device=device)
        x = torch.randn(rows, inputs // divisor, device=device)
        gradient = torch.randn(rows, outputs // divisor, device=device)
        expected = compute(layer, x, gradient, functional.linear)
        with torch.autocast(device.type, torch.bfloat16):
            plain = compute(layer, x, gradient, functional.linear)
            small = compute(layer, x, gradient, product.multiply)
        print(f"{name:>10}: bf16 {compare(plain, expected)}, fp8 {compare(small, expected)}")


def compute(
    layer: nn.Linear, x: Tensor, gradient: Tensor, multiply: Callable[..., Tensor]
) -> list[Tensor]:
    """Output and both gradients."""
    x = x.detach().requires_grad_()
    output = multiply(x, layer.weight, None)
    return [
        output.detach(),
        *torch.autograd.grad(output, (x, layer.weight), gradient.to(output.dtype)),
    ]


def compare(found: list[Tensor], expected: list[Tensor]) -> str:
    pairs = zip(found, expected, strict=True)
    return "/".join(f"{float((a.float() - b).norm() / b.norm()):.4f}" for a, b in pairs)


def train(settings: dict[str, Any], *, size: str, steps: int) -> None:
    """Train Llama 1B and print losses, tokens per second and the peak of memory."""
    work = list_workloads(size)["llama1b"]
    engine = RapidformerEngine(
        args={"lr": 1e-4, "train_iters": steps, "micro_batch_size": work.batch, "mixed_precision":
              "bf16", "log_level": "error", **settings}
    )  # fmt: skip
    torch.manual_seed(1)
    with engine.device:
        model = work.build()
    engine.compose(model)
    model.train()
    batches = make_batches(work, engine.device)
    losses = []
    tokens = batches[0]["input_ids"].numel()
    start = 0.0
    for number in range(steps):
        if number == WARM_UP:
            start = wait()
        loss = model(**batches[number % len(batches)]).loss
        engine.backward(loss, tokens)
        engine.step()
        losses.append(loss.detach())
    rate = tokens * (steps - WARM_UP) / (wait() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    shown = " ".join(f"{float(loss):.3f}" for loss in losses[:: max(steps // 8, 1)])
    print(f"{rate:,.0f} tokens/s, {peak:.1f} GiB, losses {shown}", flush=True)
    engine.close()


def make_batches(work: Workload, device: torch.device) -> list[dict[str, Tensor]]:
    rows = work.make_rows(BATCHES * work.batch)
    parts = [rows[number::BATCHES] for number in range(BATCHES)]
    return [{name: v.to(device) for name, v in PadCollator()(part).items()} for part in parts]


def wait() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    options = parser.parse_args()
    is_tiny = options.size == "tiny"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if is_tiny:
        os.environ[EMULATE_VARIABLE] = "1"
        layers.SMALLEST = 64
    print("relative errors of output/input gradient/weight gradient")
    print_layer_errors(device, rows=4096 // (16 if is_tiny else 1), divisor=32 if is_tiny else 1)
    for name in options.runs:
        print(f"{name}: ", end="", flush=True)
        train(RUNS[name], size=options.size, steps=options.steps)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
