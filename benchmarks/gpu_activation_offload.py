"""``--activation-offload`` on one GPU: bit-identical losses and gradients, memory, time.

    python benchmarks/gpu_activation_offload.py

Each line is one combination of switches, run without and with the offload. Exits with 1 if a loss
or a gradient differs in any bit, or if the offload does not lower the peak.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from process_groups import run_in_group
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer import RapidformerEngine

STEPS, WARM_UP, ROWS, LENGTH = 8, 3, 8, 1024
OTHERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mixed_precision": "bf16"},
    "bf16, recompute": {"mixed_precision": "bf16", "checkpoint_activations": True},
    "bf16, compile": {"mixed_precision": "bf16", "compile": True},
    "bf16, ZeRO-3 on one GPU": {"mixed_precision": "bf16", "cpu_offload": True},
}


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16,
            num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def run(settings: dict[str, Any]) -> tuple[list[float], list[float], float, float]:
    """Losses, a checksum of each gradient, peak GiB and milliseconds per step of a short run."""
    engine = RapidformerEngine(
        args={"lr": 1e-4, "train_iters": STEPS, "micro_batch_size": ROWS, "log_level": "error",
              "deterministic": True, **settings}
    )  # fmt: skip
    model = engine.build_model(build_model)
    engine.compose(model)
    model.train()
    losses, sums, start = [], [], 0.0
    for number in range(STEPS):
        if number == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 4000, (ROWS, LENGTH), generator=generator).to(engine.device)
        loss = model(input_ids=ids, labels=ids).loss
        engine.backward(loss, ROWS * (LENGTH - 1))
        losses.append(loss.detach())
        if number == 0:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
            sums = [float(gradient.double().sum()) for gradient in local]
        engine.step()
    torch.cuda.synchronize()
    elapsed = (time.perf_counter() - start) / (STEPS - WARM_UP) * 1000
    peak = torch.cuda.max_memory_allocated() / 2**30
    engine.close()
    return [float(loss) for loss in losses], sums, peak, elapsed


def main() -> int:
    is_fine = True
    for name, settings in OTHERS.items():
        # Each run has its own process; the parent must not touch the GPU.
        off = run_in_group(run, 1, settings)[0]
        on = run_in_group(run, 1, {**settings, "activation_offload": True})[0]
        is_equal = on[:2] == off[:2]
        # With recompute little is saved, and the peak is that of the logits.
        is_lower = on[2] < off[2] or ("checkpoint_activations" in settings and on[2] <= off[2])
        is_fine = is_fine and is_equal and is_lower
        print(
            f"{'ok    ' if is_equal and is_lower else 'FAILED'} {name}: "
            f"{'bit-equal' if is_equal else 'different'}, peak {off[2]:.2f} -> {on[2]:.2f} GiB, "
            f"{off[3]:.0f} -> {on[3]:.0f} ms a step"
        )
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
