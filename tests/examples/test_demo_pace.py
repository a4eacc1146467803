"""The demo's length follows the machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "examples" / "demo" / "pace.py"


@pytest.fixture(scope="module")
def pace() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_pace", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_fast_machine_trains_everything(pace: ModuleType) -> None:
    assert pace.choose_steps(0.01, wanted=1200, eval_batches=30) == 1200


def test_a_slow_machine_trains_what_fits(pace: ModuleType) -> None:
    steps = pace.choose_steps(0.25, wanted=1200, eval_batches=30)
    assert steps == 260
    assert 0.25 * (steps + pace.EVALUATIONS * 30 / 3) <= pace.TRAINING_SECONDS
    assert pace.choose_steps(60.0, wanted=1200, eval_batches=30) == 40, "never nothing"


def test_a_step_is_measured(pace: ModuleType, small_model: Path) -> None:
    assert 0 < pace.measure_step(small_model, batch_size=2, length=8) < 60
