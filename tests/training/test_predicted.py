"""A run's prediction: compared at its end, and asked for when GPU memory runs out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer.config import Settings
from rapidformer.dist.processes import start_processes
from rapidformer.training import predicted
from rapidformer.training.predicted import (
    PredictionReport,
    advise_on_memory,
    compare,
    describe_memory,
    finish_prediction,
    measure_peak,
    start_prediction,
)
from tests.processes import run_in_kept_processes

CPU = torch.device("cpu")
FOUND: dict[str, Any] = {
    "memory_gib": 52.5, "allocated_gib": 50.2, "step_time": 0.34, "devices": "H200", "fits": False,
    "device_memory_gib": 40.0, "memory": {"weights": 4.6, "optimizer": 9.2, "activations": 33.5},
    "switches": [{"flags": "--compile", "memory_gib": 32.1, "step_time": 0.26}], "layouts": [],
}  # fmt: skip


class Spoken:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[dict[str, Any]] = []

    def say(self, message: str) -> None:
        self.lines.append(message)

    def record(self, line: dict[str, Any]) -> None:
        self.records.append(line)


def answer_with(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A process that ends at once stands for `rapidformer plan`."""
    started = predicted.subprocess.Popen

    def start(words: list[str], **options: Any) -> Any:
        assert words[1:4] == ["-m", "rapidformer", "plan"]
        assert options["env"]["CUDA_VISIBLE_DEVICES"] == "" and "RANK" not in options["env"]
        assert "RAPIDFORMER_HEARTBEATS" not in options["env"]
        return started([sys.executable, "-c", code], **options)

    monkeypatch.setattr(predicted.subprocess, "Popen", start)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("RAPIDFORMER_HEARTBEATS", "folder")


def test_both_are_compared_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, f"print({json.dumps(FOUND)!r})")
    spoken: Any = Spoken()
    report = PredictionReport(spoken, Settings(save=str(tmp_path)), CPU)
    loop: Any = type("Loop", (), {"step": 7})
    report.on_train_begin(loop, loop)
    report.on_log(loop, loop, {"step_time": 0.3})
    report.on_train_end(loop, loop)
    assert spoken.lines == ["plan      50.2 GiB predicted; 340 ms per step predicted, on H200"]
    assert spoken.records == [
        {"step": 7, "predicted_memory_gib": 50.2, "predicted_step_time": 0.34}
    ]
    assert json.loads((tmp_path / "plan.json").read_text()) == FOUND


def peak_of_rank(device: torch.device) -> float | None:
    """In every process: what it compares with a prediction."""
    own = (1 + start_processes(device="cpu").rank) * predicted.GIB
    with mock.patch.object(torch.cuda, "max_memory_allocated", lambda device: own):
        return measure_peak(device)


def test_the_fullest_rank_is_compared() -> None:
    assert run_in_kept_processes(peak_of_rank, 2, torch.device("cuda", 0)) == [2.0, 2.0]
    assert measure_peak(CPU) is None


def test_only_the_main_rank_speaks() -> None:
    spoken: Any = Spoken()
    report = PredictionReport(spoken, Settings(save="nowhere"), CPU, is_main=False)
    loop: Any = type("Loop", (), {"step": 7})
    report.on_train_begin(loop, loop)
    report.on_train_end(loop, loop)
    assert not spoken.lines and not spoken.records


def test_no_prediction_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = Settings(save=str(tmp_path))
    answer_with(monkeypatch, "import sys; sys.exit('error: no such task')")
    assert finish_prediction(start_prediction(args, CPU), args) == "error: no such task"
    assert finish_prediction(start_prediction(Settings(), CPU), args) == (
        "it could not be started, or the run has no folder (--save)"
    )
    assert not (tmp_path / "plan.json").exists()


def test_the_error_of_both_is_named() -> None:
    text = compare(
        {"memory_gib": 28.0, "step_time": 0.135}, {"memory_gib": 27.7, "step_time": 0.15}, "H200"
    )
    assert text == (
        "28 GiB predicted, 27.7 measured (+1%); 135 ms per step predicted, 150 measured (-10%)"
    )


def test_out_of_memory_names_what_takes_it_and_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rapidformer.cli.main import describe_exhaustion

    answer_with(monkeypatch, f"print({json.dumps(FOUND)!r})")
    error: Any = torch.OutOfMemoryError("CUDA out of memory.")
    advise_on_memory(error, Settings(save=str(tmp_path)), CPU)
    assert describe_exhaustion(error) == (
        "GPU memory ran out: CUDA out of memory. The run is predicted to need 52.5 GiB "
        "(activations 33.5, optimizer 9.2, weights 4.6, ...); the device has 40.0 GiB. The nearest "
        "that fits, with the same result: --compile (32.1 GiB, 260 ms per step)."
    )
    assert describe_memory({**FOUND, "switches": []}).endswith("No layout fits this device.")
    assert "rows may be longer" in describe_memory({**FOUND, "fits": True})
    close = {**FOUND["switches"][0], "memory_gib": 51.0}
    assert "--compile (51.0 GiB" in describe_memory({**FOUND, "switches": [close]})
    assert "No layout" not in describe_memory({**FOUND, "fits": True, "switches": [close]})
    other = ValueError("a bug")
    advise_on_memory(other, Settings(save=str(tmp_path)), CPU)
    assert not hasattr(other, "advice")
