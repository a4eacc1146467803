"""The memory that a training step keeps for its backward pass, per rank, under context parallelism.

    python benchmarks/context_memory.py [--length 2048] [--vocabulary 8192]

Counts the bytes of all tensors that autograd saves in one forward pass with labels (without the
weights; a tensor saved twice counts once), for one rank and for --context-parallel-size 2 and 4,
with and without --checkpoint-activations. A count, not a timing: the same on any machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.processes import run_in_processes
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer.engine import RapidformerEngine


def measure(length: int, vocabulary: int, settings: dict[str, Any]) -> int:
    """The bytes that one forward pass keeps on this rank."""
    torch.set_num_threads(1)
    engine = RapidformerEngine(
        args={"lr": 1e-3, "train_iters": 1, "log_level": "error", "micro_batch_size": 1, **settings}
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=length,
        )
    )  # fmt: skip
    engine.compose(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(length)[None] % vocabulary
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.train()(input_ids=ids, labels=ids).loss
    del loss
    engine.close()
    return sum(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=8192)
    options = parser.parse_args()
    print("| --context-parallel-size | kept per rank | with --checkpoint-activations |")
    print("|---|---|---|")
    first: list[int] = []
    for size in (1, 2, 4):
        found = []
        for recompute in (False, True):
            settings = {"context_parallel_size": size, "checkpoint_activations": recompute}
            results = run_in_processes(measure, size, options.length, options.vocabulary, settings)
            found.append(max(results))
        first = first or found
        cells = [
            f"{n / 2**20:.1f} MiB ({n / one:.0%})" for n, one in zip(found, first, strict=True)
        ]
        print(f"| {size} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
