"""Every model under every layout of every kind of parallelism, beside one process.

    python tests/parity/matrix.py [MODEL ...]

A cell is the worst relative difference of a loss and of a gradient; a dash, that the combination is
refused (with the reason below the table). Models in stages have eight blocks and a table of their
own. The whole takes an hour on two cores; models may be asked for one by one.
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
    "DP2": (2, {}),
    "DP4": (4, {}),
    **{f"ZeRO-{n} 2": (2, {f"zero_{n}_memory_optimization": True}) for n in (1, 2, 3)},
    "ZeRO-3 4 recompute": (4, {"zero_3_memory_optimization": True, "checkpoint_activations": True}),
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
ONLY_STAGED = ("mistral", "gpt2-frozen", "shared-bias")
WITH_EXPERTS = ("gpt-moe", "mixtral")
LIMIT = 1e-5
EPOCHS = 4
"""Of three updates each: the promise is made for ten."""

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

Cells = dict[str, dict[str, str]]


def compare_layouts(name: str, cells: Cells, reasons: dict[str, str]) -> bool:
    """Fill a model's column; whether everything was equal."""
    reference = run_one(name, make_sgd, EPOCHS)
    is_exact = True
    for layout, (world_size, settings) in LAYOUTS.items():
        expected = reference
        if EXPERT in settings and name not in WITH_EXPERTS:
            cells[layout][name] = ""
            continue
        if name == "gpt-moe":
            # A mixture's loss is a mean over the micro-batch: the same ones must be added up.
            settings = {**settings, "micro_batch_size": 1}
            expected = run_micro_batches(name, make_sgd, EPOCHS)
        try:
            traces = run_in_processes(run_split, world_size, [name], settings, make_sgd, EPOCHS)
        except AssertionError as error:
            reasons[f"{name}, {layout}"] = str(error).strip().splitlines()[-1]
            cells[layout][name] = "-"
            continue
        worst = [compare(trace[name], expected) for trace in traces]
        loss, gradient = (max(w[key][0] for w in worst) for key in ("loss", "gradient"))
        is_exact &= max(loss, gradient) < LIMIT
        is_exact &= all(trace[name].ties == reference.ties for trace in traces)
        cells[layout][name] = f"{loss:.0e} {gradient:.0e}"
    return is_exact


def compare_stages(name: str, cells: Cells, reasons: dict[str, str]) -> bool:
    """The same for a model that is cut into stages: losses of 12 updates, the first gradients."""
    reference = staged.run_one(name, 8)
    is_exact = True
    for layout, (world_size, settings) in STAGED_LAYOUTS.items():
        try:
            traces = run_in_processes(staged.run_staged, world_size, [(name, 8, settings)])
        except AssertionError as error:
            reasons[f"{name}, {layout}"] = str(error).strip().splitlines()[-1]
            cells[layout][name] = "-"
            continue
        mine = staged.join([t[0] for t in traces], is_bit_equal=TENSOR not in settings)
        worst = compare(mine, reference)
        is_exact &= max(worst["loss"][0], worst["gradient"][0]) < LIMIT
        is_exact &= mine.ties == reference.ties
        cells[layout][name] = f"{worst['loss'][0]:.0e} {worst['gradient'][0]:.0e}"
    return is_exact


def show(cells: Cells, names: list[str]) -> None:
    """One table: layouts by models."""
    print("| layout | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for layout, row in cells.items():
        print(f"| {layout} | " + " | ".join(row[name] for name in names) + " |")
    print()


def main(asked: list[str]) -> int:
    torch.set_num_threads(1)
    is_exact = True
    reasons: dict[str, str] = {}
    names = [n for n in MODELS if n not in ONLY_STAGED and (n in asked or not asked)]
    cells: Cells = {layout: {} for layout in LAYOUTS}
    for name in names:
        is_exact &= compare_layouts(name, cells, reasons)
    if names:
        show(cells, names)
    names = [name for name in staged.STAGED if name in asked or not asked]
    cells = {layout: {} for layout in STAGED_LAYOUTS}
    for name in names:
        is_exact &= compare_stages(name, cells, reasons)
    if names:
        show(cells, names)
    for where, reason in reasons.items():
        print(f"- {where}: {reason}")
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
