"""Every model under every layout of tensor parallelism, beside one process: one table.

    python tests/parity/matrix.py [MODEL ...]

A cell is the worst relative difference of a loss and of a gradient; a dash, that the combination is
refused (with the reason below the table).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.parity.tensor_harness import MODELS, ROWS, compare, make_sgd, run_one, run_split
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
            if name == "gpt-moe":
                # A mixture's loss is a mean over the micro-batch: only one of all rows is the same.
                settings = {**settings, "micro_batch_size": ROWS}
                if world_size > settings[TENSOR]:
                    cells.append("")
                    continue
            try:
                traces = run_in_processes(run_split, world_size, [name], settings, make_sgd, EPOCHS)
            except AssertionError as error:
                reasons[f"{name}, {layout}"] = str(error).strip().splitlines()[-1]
                cells.append("-")
                continue
            worst = [compare(trace[name], reference) for trace in traces]
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(MODELS)))
