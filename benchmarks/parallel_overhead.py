"""The overhead of our parallel switches over the same thing written by hand in bare PyTorch.

    python benchmarks/parallel_overhead.py [--steps 60] [--only tensor]

Two ranks on the CPU, one thread each. Both sides train the same model on the same rows, clip and
update with fused AdamW; they alternate step by step, so that other load on the machine slows both.
By hand means: DistributedDataParallel; fully_shard per block and on the root; parallelize_module
with the embedding, the head and the loss split over the vocabulary. CPU time, which other programs
on the machine do not affect, is compared as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from process_groups import run_in_group
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer import RapidformerEngine
from rapidformer.dist.topology import get_topology

PROCESSES, ROWS, LENGTH, WARM_UP = 2, 8, 64, 5
Step = Callable[[torch.Tensor], None]

SETTINGS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "ZeRO-1": {"zero_1_memory_optimization": True},
    "ZeRO-2": {"zero_2_memory_optimization": True},
    "ZeRO-3": {"zero_3_memory_optimization": True},
    "tensor": {"tensor_model_parallel_size": PROCESSES},
}


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4000, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def make_batches(steps: int, replica: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(replica)
    for _ in range(steps):
        yield torch.randint(0, 4000, (ROWS, LENGTH), generator=generator)


# ---- by hand -------------------------------------------------------------------------------------


def write_by_hand(kind: str) -> Step:
    model = build_model()
    if kind == "tensor":
        return _split_layers(model)
    called: nn.Module = model
    if kind == "data parallel":
        called = DistributedDataParallel(model)
    else:
        mesh = get_topology().get_replica_mesh()
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=kind == "ZeRO-3")
        fully_shard(model, mesh=mesh, reshard_after_forward=kind == "ZeRO-3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(ids: torch.Tensor) -> None:
        called(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _split_layers(model: LlamaForCausalLM) -> Step:
    mesh = get_topology().get_submesh("tensor")
    assert mesh is not None
    column, row = ColwiseParallel, RowwiseParallel
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[f"model.layers.*.{name}"] = column()
    plan |= {"model.layers.*.mlp.gate_proj": column(), "model.layers.*.mlp.up_proj": column()}
    plan |= {"model.layers.*.self_attn.o_proj": row(), "model.layers.*.mlp.down_proj": row()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    # Two groups: torch's fused update cannot mix DTensors and plain tensors.
    groups = [{"params": split}, {"params": whole}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)

    def step(ids: torch.Tensor) -> None:
        with loss_parallel():
            logits = model(input_ids=ids).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        _clip(split, whole)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _clip(split: list[Any], whole: list[Any]) -> None:
    norms = [nn.utils.get_total_norm([p.grad for p in part]) for part in (split, whole)]
    norm = torch.stack([norms[0].full_tensor(), norms[1]]).norm()
    coefficient = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([p.grad.to_local() for p in split], coefficient)
    torch._foreach_mul_([p.grad for p in whole], coefficient)


# ---- ours ----------------------------------------------------------------------------------------


def switch_on(engine: RapidformerEngine) -> Step:
    model, _, _ = engine.compose(build_model())

    def step(ids: torch.Tensor) -> None:
        engine.backward(model(input_ids=ids, labels=ids).loss, ROWS * (LENGTH - 1))
        engine.step()

    return step


def race(kind: str, steps: int) -> list[tuple[float, float, float, float]]:
    """Of each step, ours and by hand: seconds, and seconds of CPU time."""
    torch.set_num_threads(1)
    engine = RapidformerEngine(
        args={**SETTINGS[kind], "micro_batch_size": ROWS, "lr": 1e-3, "train_iters": steps,
              "lr_decay_style": "constant", "log_level": "error", "device": "cpu"}
    )  # fmt: skip
    sides = [switch_on(engine), write_by_hand(kind)]
    times = []
    for number, ids in enumerate(make_batches(steps, engine.runtime.topology.get_rank("data"))):
        seconds, busy = [0.0, 0.0], [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            start, started = time.perf_counter(), time.process_time()
            sides[side](ids)
            seconds[side] = time.perf_counter() - start
            busy[side] = time.process_time() - started
        times.append((*seconds, *busy))
    engine.close()
    return times[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", choices=[*SETTINGS], action="append")
    options = parser.parse_args()
    print(
        "| switch | by hand | rapidformer | speed of bare PyTorch | in the median step "
        "| by CPU time |"
    )
    print("|---|---|---|---|---|---|")
    for kind in options.only or SETTINGS:
        ranks = run_in_group(race, PROCESSES, kind, options.steps)
        # A step ends when the slower rank is done.
        steps = [tuple(map(max, zip(*each, strict=True))) for each in zip(*ranks, strict=True)]
        ours, bare = (statistics.mean(step[side] for step in steps) * 1000 for side in (0, 1))
        typical = statistics.median(step[1] / step[0] for step in steps)
        busy = statistics.median(step[3] / step[2] for step in steps)
        print(
            f"| {kind} | {bare:.1f} ms | {ours:.1f} ms | {bare / ours:.1%} | {typical:.1%} "
            f"| {busy:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
