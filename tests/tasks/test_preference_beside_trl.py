"""A few losses beside TRL's own trainers; tests/borrowed/trl_parity.py runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.borrowed.trl_parity import LIMIT, run_case

# TRL is installed for the slow tests alone.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["sigmoid", "kto", "reward"])
def test_losses_metrics_and_weights_are_those_of_trl(name: str, tmp_path: Path) -> None:
    assert max(run_case("llama", name, tmp_path).values()) < LIMIT
