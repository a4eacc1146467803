"""Measuring the device leaves no trace in the run."""

from __future__ import annotations

import pytest
import torch

from rapidformer.dist import matrix_rate
from rapidformer.dist.matrix_rate import measure_matrix_rate, measure_rank_rate


def test_measuring_draws_nothing_from_the_runs_random_numbers() -> None:
    """It did: a resumed run drew other dropout masks than the uninterrupted one."""
    measure_matrix_rate.cache_clear()
    before = torch.get_rng_state()
    assert measure_matrix_rate(torch.device("cpu"), torch.float32) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_that_share_a_cpu_have_no_rate() -> None:
    cpu = torch.device("cpu")
    assert measure_rank_rate(cpu, None, 1) == measure_matrix_rate(cpu, torch.float32)
    assert measure_rank_rate(cpu, torch.bfloat16, 2) is None


def test_an_emulated_type_is_measured_on_a_small_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes seconds for a large one if the processor has no 16 bits: the run stood still."""
    sizes: list[int] = []
    monkeypatch.setattr(matrix_rate, "_build_product", lambda size, *_: sizes.append(size))
    monkeypatch.setattr(matrix_rate, "_time_on_host", lambda _: 1.0)
    measure_matrix_rate.cache_clear()
    assert measure_matrix_rate(torch.device("cpu"), torch.bfloat16) == 2 * 64**3
    measure_matrix_rate.cache_clear()
    assert sizes == [64]
