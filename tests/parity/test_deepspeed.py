"""DeepSpeed stages, offload and split layers give the bare loop's losses, gradients and weights."""

from __future__ import annotations

from typing import Any

import pytest

from rapidformer.verification.trace import Trace
from tests.parity.harness import SHORT, Training, check_case, run_on
from tests.parity.under_deepspeed import LIMITS, build_case

pytest.importorskip("deepspeed", reason="the extra rapidformer[deepspeed] is not installed")

CPU = {"device": "cpu"}
# Every stage, and every family of models once.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 0": ("plain", {}),
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
    "stage 1 x tensor 2": (
        "llama",
        {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
    ),
    "stage 2 x tensor 2": (
        "t5",
        {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}},
    ),
}
BRIEF = ("stage 0", "stage 1", "stage 2", "stage 1 x tensor 2", "stage 2 x tensor 2")
"""One update shows their layout: what comes after it is DeepSpeed's own in every stage."""
FUSED = ("stage 1", "stage 2 offloaded", "stage 2 x tensor 2")


Run = tuple[Training, list[Trace]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """What each case trains, and the traces of its processes."""
    folder = tmp_path_factory.mktemp("deepspeed")
    cases = [
        build_case(
            *case,
            folder,
            rows=SHORT if name in BRIEF else 12,
            fused_loss="on" if name in FUSED else "auto",
        )
        for name, case in CASES.items()
    ]
    trainings = [training for training, _ in cases]
    return dict(zip(CASES, zip(trainings, run_on(2, cases), strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_gives_the_result_of_one_process(case: str, runs: dict[str, Run]) -> None:
    check_case(*runs[case], LIMITS)
