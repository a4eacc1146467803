"""AdamW and the gradient's norm on one GPU: torch's fused ones and ours, in time and bytes.

    python benchmarks/gpu_adamw.py [--parameters 1200000000] [--tensors 12] [--size tiny]

A second table has BERT-base's 199 tensors, and the time that the host takes to launch a step.
``--size tiny`` tries the script on a CPU, where both are torch's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import BertConfig, BertModel

from rapidformer.compat.torch_tensors import compute_norms
from rapidformer.optim.bf16_adamw import Bf16AdamW
from rapidformer.optim.gradients import get_norm
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW

REPEATS = 20
# What a step reads and writes of each parameter: weight, gradient and two moments.
BYTES, BYTES_BF16, BYTES_NORM = 28, 20, 4


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of one call: until the device has finished, and until the host has."""
    for _ in range(3):
        work()
    wait()
    start = time.perf_counter()
    for _ in range(REPEATS):
        work()
    wait()
    device, host = (time.perf_counter() - start) / REPEATS, []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        host.append(time.perf_counter() - start)
        wait()
    return device, statistics.median(host)


def compare(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    count = sum(parameter.numel() for parameter in parameters)
    print(f"{count:,} parameters in {len(parameters)} tensors")
    first = report("torch's fused AdamW", AdamW(parameters, fused=True).step, count * BYTES)
    ours = MultiTensorAdamW(parameters, fused=True)
    report("ours", ours.step, count * BYTES, first)
    report("ours, moments in bf16", Bf16AdamW(parameters).step, count * BYTES_BF16, first)
    divided = AdamW(parameters, fused=True)
    divisor = torch.full((), 1.0, device=parameters[0].device)
    divided.grad_scale = ours.grad_scale = divisor  # type: ignore[attr-defined]
    first = report("torch's, with clipping", divided.step, count * BYTES)
    report("ours, with clipping", ours.step, count * BYTES, first)
    first = report("torch's norm", lambda: add_up(gradients), count * BYTES_NORM)
    report("ours", lambda: get_norm(gradients), count * BYTES_NORM, first)


def add_up(gradients: list[Tensor]) -> Tensor:
    return torch.stack(compute_norms(gradients)).double().square().sum().sqrt()


def report(name: str, work: Callable[[], object], size: int, first: float | None = None) -> float:
    device, host = measure(work)
    ratio = "" if first is None else f", {first / device:.2f} times as fast"
    print(
        f"{name:>24}: {device * 1e3:7.2f} ms, {size / device / 1e12:.2f} TB/s, "
        f"host {host * 1e6:.0f} us{ratio}"
    )
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=1_200_000_000)
    parser.add_argument("--tensors", type=int, default=12)
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_tiny = args.size == "tiny"
    each = (10_000 if is_tiny else args.parameters) // args.tensors
    compare([nn.Parameter(torch.zeros(each, device=device)) for _ in range(args.tensors)])
    sizes = {"hidden_size": 24, "vocab_size": 100, "intermediate_size": 48} if is_tiny else {}
    compare(list(BertModel(BertConfig(**sizes)).to(device).parameters()))


if __name__ == "__main__":
    main()
