"""Check CPU offloading on one GPU: same numbers, less GPU memory, checkpoints.

    python benchmarks/gpu_offload_check.py

There is one process, so the state is moved but not sharded. Prints one line per check, with its
figures, and exits with 1 if one of them fails.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from process_groups import run_in_group
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer import RapidformerEngine

STEPS, ROWS, LENGTH = 8, 4, 128


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
            num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def run(settings: dict[str, Any], load: str | None = None, save: str | None = None) -> Any:
    """Losses, gradient norms, the state's devices and the GPU's peak memory in a short run."""
    torch.set_float32_matmul_precision("highest")
    engine = RapidformerEngine(
        args={"lr": 1e-4, "adam_eps": 1e-6, "train_iters": 2 * STEPS, "micro_batch_size": ROWS,
              "gradient_accumulation_steps": 2, "log_level": "error", **settings}
    )  # fmt: skip
    model = engine.build_model(build_model)
    engine.compose(model)
    torch.cuda.reset_peak_memory_stats()
    if load is not None:
        engine.load_checkpoint(load)
    first = engine.updates.clock.updates
    losses, norms = [], []
    model.train()
    for number in range(first * 2, (first + STEPS) * 2):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 16000, (ROWS, LENGTH), generator=generator).to(engine.device)
        loss = model(input_ids=ids, labels=ids).loss
        # A count on the device, as the training loop passes it.
        engine.backward(loss, torch.tensor(float(ROWS * (LENGTH - 1)), device=engine.device))
        losses.append(loss.item())
        if number % 2:
            norms.append(float(engine.updates.clock.grad_norm or 0.0))
        engine.step()
    assert engine.updates.optimizer is not None
    if save is not None:
        engine.save_checkpoint(save)
        engine.export(f"{save}/model")
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    state = [v for each in engine.updates.optimizer.state.values() for v in each.values()]
    places = {t.device.type for t in [*weights, *state] if t.dim()}
    peak = torch.cuda.max_memory_allocated() / 2**20
    engine.close()
    return losses, norms, places, peak


def get_distance(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(first, second, strict=True))


def main() -> int:
    results: dict[str, tuple[bool, str]] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        # Each run has its own process; the parent must not touch the GPU.
        plain = run_in_group(run, 1, {}, None, str(folder / "plain"))[0]
        # AdamW amplifies round-off, which differs between a CPU and a GPU; SGD does not.
        simple = {"optimizer": "sgd", "lr": 0.1}
        exact = run_in_group(run, 1, simple)[0]
        for stage in (1, 2, 3):
            settings = {f"zero_{stage}_memory_optimization": True, "cpu_offload": True}
            save = str(folder / "offloaded") if stage == 3 else None
            losses, norms, places, peak = run_in_group(run, 1, settings, None, save)[0]
            far = max(get_distance(losses, plain[0]), get_distance(norms, plain[1]))
            results[f"ZeRO-{stage} --cpu-offload stays near the plain run, AdamW"] = (
                far < 1e-3,
                f"{far:.0e}",
            )
            alike = run_in_group(run, 1, {**settings, **simple})[0]
            far = max(get_distance(alike[i], exact[i]) for i in (0, 1))
            results[f"ZeRO-{stage} --cpu-offload equals the plain run, SGD"] = (
                far < 1e-5,
                f"{far:.0e}",
            )
            results[f"ZeRO-{stage} keeps its state in host memory"] = (
                places == {"cpu"},
                f"GPU peak {peak:.0f} MiB against {plain[3]:.0f}",
            )
        offload = {"cpu_offload": True}
        for precision in ("bf16", "fp16"):
            half = {"mixed_precision": precision}
            on = run_in_group(run, 1, {**half, **offload})[0]
            off = run_in_group(run, 1, half)[0]
            far = get_distance(on[0], off[0])
            results[f"--cpu-offload in {precision}"] = (far < 1e-2, f"{far:.0e}")
        for source, settings in (("plain", offload), ("offloaded", {})):
            on = run_in_group(run, 1, settings, str(folder / source))[0]
            off = run_in_group(run, 1, {}, str(folder / "plain"))[0]
            far = get_distance(on[0], off[0])
            results[f"resumes from a checkpoint, {source}"] = (far < 1e-4, f"{far:.0e}")
        exported = [
            LlamaForCausalLM.from_pretrained(folder / name / "model").state_dict()
            for name in ("plain", "offloaded")
        ]
        far = max(float((a - exported[1][n]).abs().max()) for n, a in exported[0].items())
        results["exported weights are equal"] = (far < 1e-4, f"{far:.0e}")
    for name, (is_fine, figure) in results.items():
        print(f"{'ok    ' if is_fine else 'FAILED'} {name} ({figure})")
    return 0 if all(is_fine for is_fine, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
