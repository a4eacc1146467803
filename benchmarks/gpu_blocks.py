"""What --compile does with one block or norm on a GPU, next to what torch.compile does.

    python benchmarks/gpu_blocks.py [--size tiny]

Forward and backward pass in bf16 over fp32 weights, as one CUDA graph. The variants of a block are
timed in turns, since the GPU's clock varies. ``--size tiny`` tries the script on a CPU, uncompiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, GPT2Config
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.compile.hashed_dropout import hash_dropout
from rapidformer.accel.compile.merged_linears import merge_linears

TURNS, REPEATS = 5, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Rewrites = Sequence[Callable[[Any], None]]


def build_norm(is_tiny: bool) -> tuple[nn.Module, tuple[int, ...]]:
    width = 64 if is_tiny else 2048
    return LlamaRMSNorm(width), (4, 8 if is_tiny else 4096, width)


def build_gpt2(is_tiny: bool) -> tuple[nn.Module, tuple[int, ...]]:
    sizes = {"n_embd": 64, "n_head": 4} if is_tiny else {}
    config = GPT2Config(**sizes, attn_implementation="sdpa")
    return GPT2Block(config, layer_idx=0), (2, 8, 64) if is_tiny else (32, 1024, 768)


def build_bert(is_tiny: bool) -> tuple[nn.Module, tuple[int, ...]]:
    width = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = BertConfig(**(width if is_tiny else {}), attn_implementation="sdpa")
    return BertLayer(config, layer_idx=0), (2, 8, 64) if is_tiny else (64, 60, 768)


def prepare(
    build: Callable[[bool], Any], rewrites: Rewrites | None, is_tiny: bool
) -> Callable[[], None]:
    """A call that runs both passes; without rewrites they are not compiled."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        block, shape = build(is_tiny)
        rows, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)
    block.train()
    if rewrites is not None:
        backend = "inductor" if DEVICE == "cuda" else "eager"
        CompiledBlocks(backend, rewrites=rewrites).add(block)

    def run() -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            output = block(rows)
        output = output[0] if isinstance(output, tuple) else output
        torch.autograd.grad(output, [rows, *block.parameters()], gradient.to(output.dtype))

    run()
    return record(run) if DEVICE == "cuda" else run


def record(run: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        with torch.cuda.graph(graph, stream=stream):
            run()
    replay: Callable[[], None] = graph.replay
    return replay


def measure(run: Callable[[], None]) -> float:
    """Milliseconds."""
    wait()
    start = time.perf_counter()
    for _ in range(REPEATS):
        run()
    wait()
    return (time.perf_counter() - start) / REPEATS * 1000


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def compare(name: str, build: Callable[[bool], Any], before: Any, now: Any, is_tiny: bool) -> None:
    torch._dynamo.reset()
    runs = [prepare(build, rewrites, is_tiny) for rewrites in (before, now)]
    times = [[measure(run) for run in runs] for _ in range(TURNS)]
    first, second = (statistics.median(each) for each in zip(*times, strict=True))
    print(f"{name:32} {first:8.3f} ms  {second:8.3f} ms  {first / second:5.2f} x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    is_tiny = parser.parse_args().size == "tiny"
    if not is_tiny and DEVICE != "cuda":
        parser.error("this takes a GPU; --size tiny tries the script without one")
    hashed = [merge_linears, hash_dropout]
    compare("Llama's norm: as it is, compiled", build_norm, None, [], is_tiny)
    compare("GPT-2: Philox, hash", build_gpt2, [merge_linears], hashed, is_tiny)
    compare("BERT: Philox, hash", build_bert, [merge_linears], hashed, is_tiny)


if __name__ == "__main__":
    main()
