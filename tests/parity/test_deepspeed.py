"""DeepSpeed's stages, offload and AutoTP give the bare loop's losses, gradients and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_in_processes

pytest.importorskip("deepspeed", reason="the extra rapidformer[deepspeed] is not installed")

from tests.parity.deepspeed_harness import Trace, get_difference, run_cases, run_one

CPU = {"device": "cpu"}
# Every stage, and every family of models once.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 0": ("custom", {}),
    "stage 1": ("gpt2", {"zero_optimization": {"stage": 1}}),
    "stage 2": ("bert-mlm", {"zero_optimization": {"stage": 2}}),
    "stage 2 offloaded": ("llama", {"zero_optimization": {"stage": 2, "cpu_offload": True}}),
    # 0: nothing is left whole, however small.
    "stage 3": (
        "t5",
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    ),
    "stage 3 offloaded": (
        "bert",
        {"zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}},
    ),
    "autotp": (
        "llama",
        {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
    ),
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    folder: Path = tmp_path_factory.mktemp("deepspeed")
    first: dict[str, Trace] = run_in_processes(run_cases, 2, folder, CASES, 1)[0]
    return first


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_gives_the_result_of_one_process(case: str, traces: dict[str, Trace]) -> None:
    reference = run_one(CASES[case][0], 1)
    difference = get_difference(traces[case], reference)
    assert set(traces[case].gradients) == set(reference.gradients)
    assert max(difference.values()) < 1e-5, difference
