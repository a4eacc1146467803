"""Every model under every layout of every kind of parallelism, beside one process.

    python tests/parity/matrix.py [MODEL ...]
    python tests/parity/matrix.py pipeline [MODEL ...]

A cell is the worst relative difference of a loss and of a gradient; a dash, that the combination is
refused (with the reason below the table).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.parity import pipeline_harness as staged
from tests.parity.tensor_harness import MODELS, compare, make_sgd, run_one, run_split
from tests.parity.test_expert_parallel import run_micro_batches
from tests.processes import run_in_processes

TENSOR = "tensor_model_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {TENSOR: 2}),
    "TP2 SP": (2, {TENSOR: 2, "sequence_parallel": True}),
    "TP4": (4, {TENSOR: 4}),
    "TP4 SP": (4, {TENSOR: 4, "sequence_parallel": True}),
    "DP2xTP2": (4, {TENSOR: 2}),
    "ZeRO-1 2xTP2": (4, {TENSOR: 2, "zero_1_memory_optimization": True}),
    "ZeRO-2 2xTP2": (4, {TENSOR: 2, "zero_2_memory_optimization": True}),
    "FSDP2xTP2": (4, {TENSOR: 2, "fsdp_memory_optimization": True}),
    "FSDP2xTP2 SP": (
        4,
        {TENSOR: 2, "fsdp_memory_optimization": True, "sequence_parallel": True},
    ),
}
CONTEXT, EXPERT = "context_parallel_size", "expert_model_parallel_size"
ZERO_3 = {"zero_3_memory_optimization": True}
LAYOUTS |= {
    "CP2": (2, {CONTEXT: 2}),
    "CP4": (4, {CONTEXT: 4}),
    "CP2xDP2": (4, {CONTEXT: 2}),
    "CP2 ZeRO-3 recompute": (2, {CONTEXT: 2, **ZERO_3, "checkpoint_activations": True}),
    "CP2xTP2 SP": (4, {CONTEXT: 2, TENSOR: 2, "sequence_parallel": True}),
    "EP2": (2, {EXPERT: 2}),
    "EP2xDP2": (4, {EXPERT: 2}),
    "EP2xDP2 ZeRO-3": (4, {EXPERT: 2, **ZERO_3}),
    "EP2 CP2": (2, {EXPERT: 2, CONTEXT: 2}),
}
COPIES = {"hybrid_sharding_size": 2, "micro_batch_size": 1}
for _stage_number in (1, 2, 3):
    _zero = {f"zero_{_stage_number}_memory_optimization": True}
    LAYOUTS[f"ZeRO-{_stage_number} copies 2x2"] = (4, {**_zero, **COPIES})
    LAYOUTS[f"ZeRO-{_stage_number} offload"] = (2, {**_zero, "cpu_offload": True})
LAYOUTS |= {
    "ZeRO-3 copies 2x2xTP2": (8, {**ZERO_3, **COPIES, TENSOR: 2}),
    "ZeRO-3 2xTP2 offload": (4, {**ZERO_3, TENSOR: 2, "cpu_offload": True}),
    "CP2 ZeRO-3 copies 2x2": (4, {**ZERO_3, CONTEXT: 2, "hybrid_sharding_size": 2}),
    "EP2xDP2 ZeRO-3 offload": (4, {EXPERT: 2, **ZERO_3, "cpu_offload": True}),
}
WITH_EXPERTS = ("gpt-moe", "mixtral")
LIMIT = 1e-5
EPOCHS = 4
"""Of three updates each: the promise is made for ten."""


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    print("| model | " + " | ".join(LAYOUTS) + " | bytes per process: TP2, TP4, FSDP2xTP2 |")
    print("|---" * (len(LAYOUTS) + 2) + "|")
    reasons: dict[str, str] = {}
    is_exact = True
    for name in names:
        reference = run_one(name, make_sgd, EPOCHS)
        cells, shares = [], {}
        for layout, (world_size, settings) in LAYOUTS.items():
            expected = reference
            if EXPERT in settings and name not in WITH_EXPERTS:
                cells.append("")
                continue
            if name == "gpt-moe":
                # A mixture's loss is a mean over the micro-batch: the same ones must be added up.
                settings = {**settings, "micro_batch_size": 1}
                expected = run_micro_batches(name, make_sgd, EPOCHS)
            try:
                traces = run_in_processes(run_split, world_size, [name], settings, make_sgd, EPOCHS)
            except AssertionError as error:
                reasons[f"{name}, {layout}"] = str(error).strip().splitlines()[-1]
                cells.append("-")
                continue
            worst = [compare(trace[name], expected) for trace in traces]
            loss, gradient = (max(w[key][0] for w in worst) for key in ("loss", "gradient"))
            is_exact &= max(loss, gradient) < LIMIT
            is_exact &= all(trace[name].ties == reference.ties for trace in traces)
            cells.append(f"{loss:.0e} {gradient:.0e}")
            shares[layout] = max(t[name].parameter_bytes for t in traces)
        shown = [
            f"{shares[key] / reference.parameter_bytes:.0%}"
            for key in ("TP2", "TP4", "FSDP2xTP2")
            if key in shares
        ]
        print(f"| {name} | " + " | ".join(cells) + f" | {', '.join(shown)} |", flush=True)
    for where, reason in reasons.items():
        print(f"- {where}: {reason}")
    return 0 if is_exact else 1


PIPELINE = "pipeline_model_parallel_size"
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def _stage(schedule: str, size: int = 2, **more: Any) -> dict[str, Any]:
    return {PIPELINE: size, "pipeline_schedule": schedule, **more}


STAGED_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"PP2 {name}": (2, _stage(name)) for name in _SCHEDULES},
    **{f"PP4 {name}": (4, _stage(name, 4)) for name in _SCHEDULES},
    "PP2xTP2": (4, _stage("1f1b", **{TENSOR: 2})),
    "PP2xTP2 zero-bubble": (4, _stage("zero-bubble", **{TENSOR: 2})),
    "PP2xDP2": (4, _stage("1f1b")),
    "PP2xDP2 zero-bubble": (4, _stage("zero-bubble")),
    "PP2xZeRO-1": (4, _stage("1f1b", zero_1_memory_optimization=True)),
    "PP2xZeRO-2": (4, _stage("interleaved", zero_2_memory_optimization=True)),
    "PP2xFSDP2": (4, _stage("1f1b", fsdp_memory_optimization=True, checkpoint_activations=True)),
    "TP2xPP2xDP2": (8, _stage("1f1b", **{TENSOR: 2})),
}


def show_stages(names: list[str]) -> int:
    """The table of models that are cut into stages: losses of 12 updates, all gradients."""
    torch.set_num_threads(1)
    print("| model | " + " | ".join(STAGED_LAYOUTS) + " |")
    print("|---" * (len(STAGED_LAYOUTS) + 1) + "|")
    is_exact = True
    for name in names:
        reference = staged.run_one(name, 8)
        cells = []
        for world_size, settings in STAGED_LAYOUTS.values():
            traces = run_in_processes(staged.run_staged, world_size, [(name, 8, settings)])
            mine = staged.join([t[0] for t in traces], is_bit_equal=TENSOR not in settings)
            worst = compare(mine, reference)
            is_exact &= max(worst["loss"][0], worst["gradient"][0]) < LIMIT
            is_exact &= mine.ties == reference.ties
            cells.append(f"{worst['loss'][0]:.0e} {worst['gradient'][0]:.0e}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return 0 if is_exact else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["pipeline"]:
        sys.exit(show_stages(sys.argv[2:] or list(staged.MODELS)))
    sys.exit(main(sys.argv[1:] or list(MODELS)))
