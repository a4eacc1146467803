"""The memory of one rank under each layout: bytes of weights, gradients and optimizer state.

    python benchmarks/memory_per_rank.py [--layers 4] [--width 256] [--skip-build] [--lora-rank 16]

A Llama-type model, Adam, two micro-batches per update, on the CPU. "In use" are the weights between
two micro-batches; "at rest" those after the update. The second table is the peak memory that
building and sharding the model adds to a process: from its sizes and from a folder, built whole and
built in shards. With `--lora-rank`, there is one table instead: each layout with all weights
trained, and with adapters on all linear layers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from process_groups import run_in_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer import RapidformerEngine

ROWS, LENGTH = 8, 16


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {f"zero_{stage}_memory_optimization": True, **more}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "data parallel 4": (4, {}),
    "ZeRO-1, 2": (2, zero(1)),
    "ZeRO-1, 4": (4, zero(1)),
    "ZeRO-2, 2": (2, zero(2)),
    "ZeRO-2, 4": (4, zero(2)),
    "ZeRO-3, 2": (2, zero(3)),
    "ZeRO-3, 4": (4, zero(3)),
    "ZeRO-3, 4, copies of 2": (4, zero(3, hybrid_sharding_size=2)),
    "ZeRO-3, 4, offloaded": (4, zero(3, cpu_offload=True)),
    "tensor 2": (2, {"tensor_model_parallel_size": 2}),
    "tensor 4": (4, {"tensor_model_parallel_size": 4}),
    "ZeRO-3 2 x tensor 2": (4, zero(3, tensor_model_parallel_size=2)),
}


def make_config(layers: int, width: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32 * width, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
        max_position_embeddings=64,
    )  # fmt: skip


def count(tensors: Any) -> int:
    """The bytes of the tensors on this rank."""
    total = 0
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            total += local.numel() * local.element_size()
    return total


def list_gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """Every gradient, including those that fully_shard holds between micro-batches."""
    found = {id(p.grad): p.grad for p in model.parameters()}
    for module in model.modules():
        groups = (
            module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ()
        )
        for parameter in [p for group in groups for p in group.fsdp_params]:
            whole = getattr(parameter, "_unsharded_param", None)
            for gradient in (
                parameter.sharded_param.grad,
                parameter.unsharded_accumulated_grad,
                whole.grad if whole is not None else None,
            ):
                found[id(gradient)] = gradient
    return list(found.values())


def count_weights(model: torch.nn.Module) -> int:
    """The weights at the next forward pass, plus the shards they were gathered from."""
    gathered = [p for p in model.parameters() if not isinstance(p, DTensor)]
    shards = [
        p.sharded_param
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for p in group.fsdp_params
    ]
    if shards and gathered:
        return count(model.parameters()) + count(shards)
    return count(model.parameters())


def measure(config: LlamaConfig, settings: dict[str, Any]) -> dict[str, int]:
    torch.set_num_threads(1)
    engine = RapidformerEngine(
        args={**settings, "lr": 1e-3, "train_iters": 2, "log_level": "error", "device": "cpu",
              "gradient_accumulation_steps": 2, "micro_batch_size": 1}
    )  # fmt: skip
    model = engine.build_model(lambda: LlamaForCausalLM(config))
    engine.compose(model)
    model.train()
    ids = torch.arange(LENGTH)[None]
    result = {}
    for is_last in (False, True):
        engine.backward(model(input_ids=ids, labels=ids).loss, LENGTH - 1)
        if not is_last:
            result["in use"] = count_weights(model)
            result["gradients"] = count(list_gradients(model))
    engine.step()
    result["at rest"] = count(model.parameters())
    assert engine.updates.optimizer is not None
    state = engine.updates.optimizer.state.values()
    result["optimizer"] = count(v for each in state for v in each.values() if v.dim())
    engine.close()
    return result


# ---- adapters ------------------------------------------------------------------------------------


def show_adapters(config: LlamaConfig, rank: int) -> None:
    """Weights, gradients and optimizer state of a rank, without adapters and with them."""
    kinds = ("at rest", "gradients", "optimizer")
    print("| layout | trained | weights | gradients | optimizer state | all three |")
    print("|---|---|---|---|---|---|")
    adapters = {"lora_rank": rank, "lora_target_modules": ["all-linear"]}
    for name, (world_size, settings) in LAYOUTS.items():
        totals = []
        for trained, more in (("everything", {}), (f"LoRA, rank {rank}", adapters)):
            ranks = run_in_group(measure, world_size, config, {**settings, **more})
            worst = [max(each[kind] for each in ranks) for kind in kinds]
            totals.append(sum(worst))
            cells = [f"{size / 1e6:.2f} MB" for size in (*worst, totals[-1])]
            saved = f" ({totals[-1] / totals[0]:.0%})" if more else ""
            print(f"| {name} | {trained} | {' | '.join(cells)}{saved} |", flush=True)


# ---- building ------------------------------------------------------------------------------------


def read_memory(name: str) -> int:
    """A line of this process's status in the kernel, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure_build(build: Callable[[], torch.nn.Module], settings: Any, in_shards: bool) -> float:
    """Peak memory that building and sharding adds, as a fraction of the weights."""
    torch.set_num_threads(1)
    engine = RapidformerEngine(args={**settings, "log_level": "error", "device": "cpu"})
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
    before = read_memory("VmRSS")
    model = engine.build_model(build) if in_shards else build()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    engine.model.compose_for_evaluation(model)
    peak = read_memory("VmHWM") - before
    engine.close()
    return peak / total


def save(config: LlamaConfig, folder: str) -> None:
    LlamaForCausalLM(config).save_pretrained(folder)


def show_builds(config: LlamaConfig, folder: str) -> None:
    print("\n| built | ranks | whole | in shards | one shard is |")
    print("|---|---|---|---|---|")
    ways: dict[str, Callable[[], torch.nn.Module]] = {
        "from its sizes": lambda: LlamaForCausalLM(config),
        "from a folder": lambda: LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32),
    }
    for name, build in ways.items():
        for world_size in (2, 4):
            peaks = [
                max(run_in_group(measure_build, world_size, build, zero(3), in_shards))
                for in_shards in (False, True)
            ]
            whole, shards = (f"{peak:.0%}" for peak in peaks)
            print(
                f"| {name} | {world_size} | {whole} | {shards} | {1 / world_size:.0%} |", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--skip-build", action="store_true")
    parser.add_argument("--lora-rank", type=int)
    options = parser.parse_args()
    config = make_config(options.layers, options.width)
    if options.lora_rank is not None:
        show_adapters(config, options.lora_rank)
        return
    print("| layout | weights in use | weights at rest | gradients | optimizer state |")
    print("|---|---|---|---|---|")
    whole: dict[str, int] = {}
    for name, (world_size, settings) in LAYOUTS.items():
        ranks = run_in_group(measure, world_size, config, settings)
        worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        whole = whole or worst
        cells = [
            f"{worst[key] / 1e6:.1f} MB ({worst[key] / whole[key]:.0%})"
            for key in ("in use", "at rest", "gradients", "optimizer")
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if not options.skip_build:
        large = make_config(2 * options.layers, 2 * options.width)
        with tempfile.TemporaryDirectory() as folder:
            # In its own process: later processes would inherit the memory that the allocator keeps.
            run_in_group(save, 1, large, folder)
            show_builds(large, folder)


if __name__ == "__main__":
    main()
