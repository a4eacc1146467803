"""What is learnt from preferences does not depend on micro-batches, processes or layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_in_kept_processes
from tests.tasks.preference_rig import Recorder, make_answers, make_model, make_pairs, run_ours

# 10 samples: the second update has 2 of 8, so that a process may be left without any.
_BATCH = {"global_batch_size": 8}
_CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"sft_weight": 0.3},
    "orpo": {"loss": "orpo"},
    "kto": {"loss": "kto"},
    "reward": {},
}
_LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("sigmoid", {"micro_batch_size": 2}),
    ("kto", {"micro_batch_size": 2}),
    ("kto", {"micro_batch_size": 4, "zero_3_memory_optimization": True}),
    ("orpo", {"micro_batch_size": 2, "tensor_model_parallel_size": 2}),
    ("reward", {"micro_batch_size": 2, "tensor_model_parallel_size": 2}),
    ("sigmoid", {"micro_batch_size": 4, "context_parallel_size": 2}),
    ("sigmoid", {"micro_batch_size": 2, "pipeline_model_parallel_size": 2}),
]


def run_case(name: str, folder: Path, settings: dict[str, Any]) -> Recorder:
    is_reward = name == "reward"
    rows = make_answers(10) if name == "kto" else make_pairs(10)
    settings = {**_BATCH, **_CASES[name], **settings}
    place = folder / ("reward" if is_reward else "model")
    return run_ours("reward" if is_reward else "preference", place, rows, **settings)


def check_equal(result: Recorder, expected: Recorder) -> None:
    """Losses and metrics to 1e-6 (of what they are made of), gradients to 4e-6 of the largest."""
    assert len(result.lines) == len(expected.lines) == 2
    shown = ("loss", "rewards/", "logps/", "logits/", "entropy", "mean_token_accuracy", "kl",
             "nll_loss", "sft_loss", "accuracy", "margin")  # fmt: skip
    for line, wanted in zip(result.lines, expected.lines, strict=True):
        scale = max(1.0, abs(wanted.get("logps/chosen", 0.0)))
        names = [name for name in wanted if name.startswith(shown)]
        if abs(wanted.get("rewards/margins", 1.0)) < 1e-6:
            # Both answers are as likely as in the reference, up to round-off.
            names = [name for name in names if name != "rewards/accuracies"]
        for name in names:
            size = max(1.0, wanted[name]) if name == "loss" else scale
            assert abs(line[name] - wanted[name]) < 1e-6 * size, name
    for weights, wanted in zip(result.weights, expected.weights, strict=True):
        for name, weight in weights.items():
            gap = float((weight - wanted[name]).abs().max())
            assert gap < 5e-7, f"{name}: {gap:.1e}"  # at a learning rate of 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    make_model(path / "model")
    make_model(path / "reward", is_reward=True)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Recorder]:
    """What one process learns from each update as one micro-batch."""
    return {name: run_case(name, folder, {"micro_batch_size": 8}) for name in _CASES}


@pytest.mark.parametrize(("name", "size"), [("sigmoid", 4), ("orpo", 1), ("kto", 1), ("reward", 1)])
def test_micro_batches_change_nothing(
    name: str, size: int, folder: Path, expected: dict[str, Recorder]
) -> None:
    check_equal(run_case(name, folder, {"micro_batch_size": size}), expected[name])


def test_micro_batches_change_no_adapter(folder: Path) -> None:
    adapters = {"lora_rank": 2, "lora_target_modules": ["q_proj", "v_proj"]}
    whole, parts = (
        run_case("sigmoid", folder, {"micro_batch_size": size, **adapters}) for size in (8, 1)
    )
    check_equal(parts, whole)
    assert all("lora" in name for name in whole.weights[0])


def run_layouts(folder: Path) -> list[Recorder]:
    return [run_case(name, folder, settings) for name, settings in _LAYOUTS]


@pytest.mark.slow
def test_layouts_change_nothing(folder: Path, expected: dict[str, Recorder]) -> None:
    """Two processes: whole models, sharded ones, split layers, split sequences, stages."""
    for results in run_in_kept_processes(run_layouts, 2, folder):
        for (name, _), result in zip(_LAYOUTS, results, strict=True):
            check_equal(result, expected[name])
