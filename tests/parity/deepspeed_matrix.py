"""Every model under every stage of DeepSpeed, beside one process: one table.

    python tests/parity/deepspeed_matrix.py [MODEL ...]

A cell is the worst relative difference of a loss, a gradient and a weight; a dash, that the
combination is refused (with the reason below the table).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.parity.deepspeed_harness import get_difference, run_cases, run_one
from tests.processes import run_in_processes

MODELS = ("bert", "bert-mlm", "gpt2", "t5", "llama", "custom")
CPU = {"device": "cpu"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (2, {}),
    "stage 1": (2, {"zero_optimization": {"stage": 1}}),
    "stage 2": (2, {"zero_optimization": {"stage": 2}}),
    "stage 2, offload": (2, {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}}),
    "stage 3": (2, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
    "stage 3, offload": (
        2,
        {"zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}},
    ),
    "stage 3, 4 processes": (4, {"zero_optimization": {"stage": 3}}),
    "AutoTP 2": (2, {"tensor_parallel": {"autotp_size": 2}}),
    "stage 2, 2 x AutoTP 2": (
        4,
        {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}},
    ),
}
LIMIT = 1e-5
EPOCHS = 2


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    print("| model | " + " | ".join(LAYOUTS) + " |")
    print("|---" * (len(LAYOUTS) + 1) + "|")
    reasons: dict[str, str] = {}
    is_exact = True
    for name in names:
        reference = run_one(name, EPOCHS)
        cells = []
        for layout, (world_size, content) in LAYOUTS.items():
            case = {layout: (name, content)}
            try:
                with tempfile.TemporaryDirectory() as folder:
                    trace = run_in_processes(run_cases, world_size, Path(folder), case, EPOCHS)[0][
                        layout
                    ]
            except AssertionError as error:
                reasons[f"{name}, {layout}"] = str(error).strip().splitlines()[-1]
                cells.append("-")
                continue
            difference = get_difference(trace, reference)
            is_exact &= max(difference.values()) < LIMIT
            cells.append(" ".join(f"{value:.0e}" for value in difference.values()))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    for where, reason in reasons.items():
        print(f"- {where}: {reason}")
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(MODELS)))
