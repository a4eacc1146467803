"""The growing global batch: Megatron's sizes, and counts that agree with walking through them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapidformer.config import parse_arguments, resolve
from rapidformer.config.derive import BatchSchedule, get_batch_schedule
from rapidformer.errors import ConfigurationError


@st.composite
def schedules(draw: st.DrawFn) -> BatchSchedule:
    start, increment = draw(st.integers(1, 20)), draw(st.integers(1, 8))
    steps = draw(st.integers(0, 9))
    return BatchSchedule(
        final=start + steps * increment,
        start=start,
        increment=increment,
        ramp_samples=draw(st.integers(1, 500)),
    )


@given(schedules(), st.integers(0, 150), st.integers(0, 2000))
def test_counts_agree_with_walking(schedule: BatchSchedule, updates: int, samples: int) -> None:
    consumed = [0]
    while len(consumed) <= updates or consumed[-1] < samples:
        consumed.append(consumed[-1] + schedule.get_size(consumed[-1]))
    assert schedule.count_samples(updates) == consumed[updates]
    assert schedule.count_updates(samples) == next(
        number for number, total in enumerate(consumed) if total >= samples
    )


def test_sizes_are_megatrons() -> None:
    """Start 32, increment 32, over 300 samples to 128: three steps, one each 100 samples."""
    schedule = BatchSchedule(final=128, start=32, increment=32, ramp_samples=300)
    points = (0, 99, 100, 199, 200, 299, 300, 10**9)
    assert [schedule.get_size(consumed) for consumed in points] == [
        32, 32, 64, 64, 96, 96, 128, 128,
    ]  # fmt: skip


def test_a_run_without_a_ramp_is_constant() -> None:
    args = resolve(parse_arguments(["--global-batch-size", "24", "--micro-batch-size", "8"]))
    schedule = get_batch_schedule(args)
    assert schedule.is_constant
    assert (schedule.count_samples(5), schedule.count_updates(25)) == (120, 2)


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (["8", "8"], "needs three numbers"),
        (["0", "8", "100"], "every number must be at least 1"),
        (["8", "16", "100"], "must grow to --global-batch-size 32 in whole steps of 16"),
        (["40", "8", "100"], "must grow to --global-batch-size 32 in whole steps of 8"),
        (["2", "6", "100"], "multiples of --micro-batch-size 4 x 1 data-parallel rank = 4"),
    ],
)
def test_bad_ramps_are_explained(ramp: list[str], message: str) -> None:
    words = ["--global-batch-size", "32", "--micro-batch-size", "4", "--train-samples", "500"]
    with pytest.raises(ConfigurationError, match=message):
        resolve(parse_arguments([*words, "--rampup-batch-size", *ramp]))


def test_a_ramp_needs_a_length_in_samples() -> None:
    words = ["--global-batch-size", "32", "--micro-batch-size", "4", "--epochs", "2"]
    with pytest.raises(ConfigurationError, match="100 needs --train-samples"):
        resolve(parse_arguments([*words, "--rampup-batch-size", "8", "8", "100"]))


def test_tokens_are_samples_of_a_length() -> None:
    args = resolve(parse_arguments(["--train-tokens", "1001", "--seq-length", "100"]))
    assert args.train_samples == 11


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train-tokens", "100"], "--train-tokens 100 needs --seq-length"),
        (
            ["--train-tokens", "100", "--seq-length", "5", "--train-iters", "3"],
            "--train-iters and --train-tokens set the same thing",
        ),
        (
            ["--train-samples", "100", "--train-iters", "3"],
            "--train-iters and --train-samples set the same thing",
        ),
    ],
)
def test_lengths_that_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(parse_arguments(words))
