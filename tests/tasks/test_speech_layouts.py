"""What a model that listens learns does not depend on micro-batches, processes or layouts.

SpecAugment is on: its masks must be those of the samples, wherever they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_in_processes
from tests.tasks.preference_rig import Recorder, run_ours
from tests.tasks.speech_rig import make_ctc_model, make_rows, make_whisper

_MASKS = {
    "apply_spec_augment": True, "mask_time_prob": 0.4, "mask_time_length": 3,
    "mask_feature_prob": 0.3, "mask_feature_length": 2,
}  # fmt: skip
_CASES: dict[str, dict[str, Any]] = {
    "wav2vec2": {"freeze_feature_encoder": False},
    "wav2vec2-bert": {"ctc_loss_reduction": "sum"},
    "whisper": {"language": "de"},
}
# 10 rows: the second update has 2 of 8, so that a process may be left without any.
_LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("wav2vec2", {"micro_batch_size": 2}),
    ("wav2vec2", {"micro_batch_size": 4, "zero_3_memory_optimization": True}),
    ("wav2vec2-bert", {"micro_batch_size": 2, "zero_1_memory_optimization": True}),
    ("whisper", {"micro_batch_size": 2, "zero_3_memory_optimization": True}),
    ("whisper", {"micro_batch_size": 1}),
]


def run_case(name: str, folder: Path, settings: dict[str, Any]) -> Recorder:
    settings = {"global_batch_size": 8, **_MASKS, **_CASES[name], **settings}
    return run_ours("speech_recognition", folder / name, make_rows(10), **settings)


def check_equal(result: Recorder, expected: Recorder) -> None:
    assert len(result.lines) == len(expected.lines) == 2
    for line, wanted in zip(result.lines, expected.lines, strict=True):
        assert abs(line["loss"] - wanted["loss"]) < 1e-6 * wanted["loss"]
    for weights, wanted in zip(result.weights, expected.weights, strict=True):
        assert set(weights) == set(wanted)
        for name, weight in weights.items():
            gap = float((weight - wanted[name]).abs().max())
            assert gap < 3e-6, f"{name}: {gap:.1e}"  # at a learning rate of 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    make_ctc_model(path / "wav2vec2")
    make_ctc_model(path / "wav2vec2-bert", "wav2vec2-bert")
    make_whisper(path / "whisper")
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Recorder]:
    """What one process learns from each update as one micro-batch."""
    return {name: run_case(name, folder, {"micro_batch_size": 8}) for name in _CASES}


@pytest.mark.parametrize("name", list(_CASES))
def test_micro_batches_change_nothing(
    name: str, folder: Path, expected: dict[str, Recorder]
) -> None:
    check_equal(run_case(name, folder, {"micro_batch_size": 1}), expected[name])


def run_layouts(folder: Path) -> list[Recorder]:
    return [run_case(name, folder, settings) for name, settings in _LAYOUTS]


@pytest.mark.slow
def test_layouts_change_nothing(folder: Path, expected: dict[str, Recorder]) -> None:
    """Two processes: whole models and sharded ones."""
    for results in run_in_processes(run_layouts, 2, folder):
        for (name, _), result in zip(_LAYOUTS, results, strict=True):
            check_equal(result, expected[name])
