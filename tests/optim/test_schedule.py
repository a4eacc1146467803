"""The learning rate against Megatron's arithmetic, written out here by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer.config.sections import OptimizerArguments
from rapidformer.log import warn_once
from rapidformer.optim.schedule import build_curve, build_scheduler


def megatron_learning_rate(
    samples: float, *, lr: float, min_lr: float, warmup: float, decay: float, style: str
) -> float:
    """AnnealingLR.get_lr of Megatron-LM v2.6 (megatron/learning_rates.py)."""
    if warmup > 0 and samples <= warmup:
        return lr * float(samples) / float(warmup)
    if style == "constant":
        return lr
    if samples > decay:
        return min_lr
    ratio = float(samples - warmup) / float(decay - warmup)
    coefficients = {"linear": 1.0 - ratio, "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0)}
    return min_lr + coefficients[style] * (lr - min_lr)


def learning_rates(updates: int, train_iters: int, batch: int, **said: Any) -> list[float]:
    """The rate that each update is done with."""
    arguments = OptimizerArguments(**said)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.lr or 0.0)
    scheduler = build_scheduler(
        optimizer, arguments, train_iters=train_iters, count_samples=lambda updates: updates * batch
    )
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(
    ("said", "warmup", "decay"),
    [
        ({}, 0, 20 * 8),
        ({"lr_warmup_iters": 5}, 5 * 8, 20 * 8),
        ({"lr_warmup_fraction": 0.3}, 0.3 * 20 * 8, 20 * 8),
        ({"lr_warmup_samples": 28}, 28, 20 * 8),
        ({"lr_decay_iters": 12}, 0, 12 * 8),
        ({"lr_decay_iters": 12, "lr_warmup_fraction": 0.25}, 24, 96),
        ({"lr_decay_samples": 100, "lr_warmup_iters": 4}, 32, 100),
        ({"lr_warmup_iters": 30}, 240, 160),
    ],
    ids=str,
)
@pytest.mark.parametrize("min_lr", [0.0, 2e-4])
def test_curve_is_megatrons(
    style: str, said: dict[str, Any], warmup: float, decay: float, min_lr: float
) -> None:
    rates = learning_rates(26, 20, 8, lr=1e-3, min_lr=min_lr, lr_decay_style=style, **said)
    expected = [
        megatron_learning_rate(
            update * 8, lr=1e-3, min_lr=min_lr, warmup=warmup, decay=decay, style=style
        )
        for update in range(26)
    ]
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_a_warm_up_longer_than_the_run_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    for iters in (20, 19):
        warn_once.cache_clear()
        learning_rates(1, 20, 8, lr=1e-3, lr_warmup_iters=iters)
    (message,) = caplog.messages
    assert message.startswith(
        "the warm-up takes the whole run (warm-up: 160 samples, run: 160 in 20 steps)"
    )


@settings(max_examples=100, deadline=None)
@given(
    style=st.sampled_from(["constant", "linear", "cosine"]),
    iters=st.integers(1, 50),
    warmup=st.integers(0, 60),
    batch=st.integers(1, 64),
    floor=st.floats(0, 1),
    update=st.integers(0, 80),
)
def test_curve_is_megatrons_everywhere(
    style: str, iters: int, warmup: int, batch: int, floor: float, update: int
) -> None:
    if warmup == iters and update > warmup:
        return  # Megatron divides by zero there
    curve = build_curve(
        OptimizerArguments(
            lr=0.5, min_lr=0.5 * floor, lr_decay_style=style, lr_warmup_iters=warmup
        ),
        train_iters=iters,
        count_samples=lambda updates: updates * batch,
    )
    expected = megatron_learning_rate(
        update * batch,
        lr=0.5,
        min_lr=0.5 * floor,
        warmup=warmup * batch,
        decay=iters * batch,
        style=style,
    )
    assert 0.5 * curve(update * batch) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ({"lr_decay_style": "cosine"}, "does not decay (cosine)"),
        ({"lr_decay_style": "constant", "lr_warmup_fraction": 0.1}, "has no warm-up"),
        ({"lr_decay_style": "constant", "lr_warmup_iters": 3}, None),
    ],
)
def test_what_needs_the_length_of_a_run_is_reported_without_it(
    said: dict[str, Any], lost: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    curve = build_curve(OptimizerArguments(lr=1.0, **said), train_iters=None, count_samples=int)
    assert curve.style == "constant"
    assert [lost in line for line in caplog.messages] == [True] if lost else not caplog.messages


def test_first_update_has_rate_zero_with_warmup_and_the_peak_without() -> None:
    assert learning_rates(3, 10, 4, lr=1.0, lr_warmup_iters=4) == [0.0, 0.25, 0.5]
    assert learning_rates(2, 10, 4, lr=1.0) == pytest.approx([1.0, 0.9])


def test_peak_comes_right_after_the_warmup() -> None:
    rates = learning_rates(10, 10, 4, lr=1.0, lr_warmup_iters=4)
    assert max(rates) == rates[4] == 1.0


def test_floor_is_kept_beyond_the_end() -> None:
    for style in ("linear", "cosine"):
        rates = learning_rates(15, 10, 1, lr=1.0, min_lr=0.1, lr_decay_style=style)
        assert rates[10] == pytest.approx(0.1)
        assert rates[11:] == pytest.approx([0.1] * 4)


def test_same_samples_same_rate_under_another_batch_size() -> None:
    small = build_curve(
        OptimizerArguments(lr=1.0, lr_decay_samples=64, lr_warmup_samples=16),
        train_iters=16,
        count_samples=lambda updates: updates * 4,
    )
    large = build_curve(
        OptimizerArguments(lr=1.0, lr_decay_samples=64, lr_warmup_samples=16),
        train_iters=4,
        count_samples=lambda updates: updates * 16,
    )
    assert [small(samples) for samples in range(0, 80, 4)] == [
        large(samples) for samples in range(0, 80, 4)
    ]


def test_inverse_square_root() -> None:
    rates = learning_rates(
        17, 20, 1, lr=1.0, min_lr=0.55, lr_decay_style="inverse-square-root", lr_warmup_iters=4
    )
    assert rates[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert rates[9] == pytest.approx(math.sqrt(4 / 9))
    assert rates[16] == pytest.approx(0.55), "never below --min-lr"


def test_every_group_follows_its_own_peak() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:], "lr": 0.1}]
    )
    scheduler = build_scheduler(
        optimizer,
        OptimizerArguments(lr=1.0),
        train_iters=10,
        count_samples=lambda updates: updates * 1,
    )
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.9, 0.09])
