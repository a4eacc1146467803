"""Measuring the device leaves no trace in the run."""

from __future__ import annotations

import torch

from rapidformer.dist.matrix_rate import _build_product, measure_rank_rate


def test_measuring_draws_nothing_from_the_runs_random_numbers() -> None:
    """It did: a resumed run drew other dropout masks than the uninterrupted one."""
    before = torch.get_rng_state()
    _build_product(8, torch.device("cpu"), torch.float32)()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cpu_has_no_rate() -> None:
    """Measured beside other work, it was wrong for the rest of the run: 2000 % MFU."""
    assert measure_rank_rate(torch.device("cpu"), torch.float32) is None
