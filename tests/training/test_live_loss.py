"""The loss on the progress bar."""

from __future__ import annotations

import pytest
import torch

from rapidformer.training.meter import LiveLoss


def add(losses: list[float]) -> LiveLoss:
    live = LiveLoss(torch.device("cpu"))
    for loss in losses:
        live.add(torch.tensor(loss))
    return live


def test_nothing_before_the_first_loss() -> None:
    assert add([]).value is None


def test_a_running_mean_begins_at_the_first_loss_and_follows() -> None:
    assert add([2.0]).value == pytest.approx(2.0)
    assert add([2.0, 1.0]).value == pytest.approx((0.9 * 2 + 1) / 1.9)
    assert add([5.0] + [1.0] * 100).value == pytest.approx(1.0, abs=1e-3)


def test_a_loss_that_is_not_a_number_is_left_out() -> None:
    assert add([2.0, float("nan"), 2.0]).value == pytest.approx(2.0)
