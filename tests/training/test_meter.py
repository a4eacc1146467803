"""Losses and counts between two log lines: exact means, exact steps, no loss that hides."""

from __future__ import annotations

import math

import pytest
import torch

from rapidformer.data.batch import BatchInfo
from rapidformer.dist.topology import Topology
from rapidformer.training.meter import Mean, Meter, WeightedSums
from tests.conftest import Clock

NAN, INF = float("nan"), float("inf")


def info(rows: int = 2, labels: int = 6) -> BatchInfo:
    return BatchInfo(
        rows=rows, labels=labels, shifted_labels=labels, tokens=5 * rows, slots=8 * rows
    )


def mean(value: float, weight: float | torch.Tensor) -> Mean:
    return torch.tensor(value), weight


def make(losses: list[list[tuple[float, float]]], norms: list[float | None] | None = None) -> Meter:
    """Updates of micro-batches (mean loss, weight)."""
    meter = Meter(torch.device("cpu"), Topology())
    for number, update in enumerate(losses):
        for loss, weight in update:
            meter.add_micro_batch({"loss": mean(loss, weight)}, info())
        norm = 1.0 if norms is None else norms[number]
        total = sum(weight for _, weight in update)
        meter.add_update(total or 1.0, None if norm is None else torch.tensor(norm))
    return meter


def test_loss_of_an_update_is_the_weighted_mean() -> None:
    measured = make([[(1.0, 3), (5.0, 1)], [(2.0, 4)]], norms=[0.5, 0.25]).read()
    assert measured.losses == pytest.approx([2.0, 2.0])
    assert measured.loss == pytest.approx(2.0)
    assert measured.norms[-1] == 0.25, "the last update's"
    assert (measured.samples, measured.tokens, measured.slots) == (6, 30, 48)


def test_weights_may_be_tensors() -> None:
    meter = Meter(torch.device("cpu"), Topology())
    meter.add_micro_batch({"loss": mean(1.0, torch.tensor(3.0))}, info())
    meter.add_micro_batch({"loss": mean(5.0, torch.tensor(1.0))}, info())
    meter.add_update(torch.tensor(4.0), torch.tensor(1.0))
    assert meter.read().losses == pytest.approx([2.0])


def test_reading_resets_the_meter() -> None:
    meter = make([[(1.0, 1)]])
    assert meter.has_updates()
    meter.read()
    assert not meter.has_updates()
    meter.add_micro_batch({"loss": mean(3.0, 1)}, info())
    meter.add_update(1, torch.tensor(1.0))
    measured = meter.read()
    assert measured.losses == [3.0]
    assert measured.samples == 2


def test_fillers_count_for_nothing_even_when_their_loss_is_not_a_number() -> None:
    meter = make([])
    meter.add_micro_batch({"loss": mean(2.0, 4)}, info())
    meter.add_micro_batch({"loss": mean(NAN, 0)}, info().as_filler())
    meter.add_update(4, torch.tensor(1.0))
    measured = meter.read()
    assert measured.losses == [2.0]
    assert measured.samples == 2
    assert measured.slots == 32


def test_micro_batch_without_labels_does_not_end_the_run() -> None:
    """All its labels are -100: its mean is 0/0, its weight 0, and the gradient was left alone."""
    meter = make([])
    meter.add_micro_batch({"loss": mean(2.0, 4)}, info())
    meter.add_micro_batch({"loss": mean(NAN, 0)}, info(labels=0))
    meter.add_update(4, torch.tensor(1.0))
    assert meter.read().losses == [2.0]


def test_unfinished_update_waits_for_the_next_reading() -> None:
    meter = make([[(1.0, 1)]])
    meter.add_micro_batch({"loss": mean(4.0, 1)}, info())
    meter.read()
    meter.add_micro_batch({"loss": mean(2.0, 1)}, info())
    meter.add_update(2, torch.tensor(1.0))
    assert meter.read().losses == [3.0]


def test_pauses_are_not_training_time(clock: Clock) -> None:
    meter = make([[(1.0, 1)]])
    clock.now += 2.0
    with meter.paused():
        clock.now += 30.0
    clock.now += 1.0
    assert meter.read().seconds == 3.0


def test_small_losses_are_not_lost_in_the_sum() -> None:
    measured = make([[(1e-7, 1000.0)] * 3]).read()
    assert math.isclose(measured.loss, 1e-7, rel_tol=1e-5)


def test_parts_are_means_over_the_interval() -> None:
    meter = make([])
    for words, weight, counts in ((1.0, 3, True), (5.0, 1, True), (NAN, 0, False)):
        means = {"loss": mean(9.0, weight), "lm_loss": mean(words, weight)}
        meter.add_micro_batch(means, info() if counts else info().as_filler())
    meter.add_update(4, torch.tensor(1.0))
    meter.add_micro_batch({"loss": mean(9.0, 2), "lm_loss": mean(6.0, 2)}, info())
    meter.add_update(2, torch.tensor(1.0))
    measured = meter.read()
    assert measured.losses == [9.0, 9.0]
    assert measured.parts == pytest.approx({"lm_loss": 4.0})


def test_parts_may_have_weights_of_their_own() -> None:
    """Also where one counts and the other does not, in a micro-batch or a whole update."""
    meter = make([])
    for words, order in (((1.0, 3), (0.5, 2)), ((5.0, 1), (0.9, 2)), ((NAN, 0), (0.1, 4))):
        means = {"loss": mean(9.0, order[1]), "lm_loss": mean(*words), "sop_loss": mean(*order)}
        meter.add_micro_batch(means, info())
    meter.add_update(8, torch.tensor(1.0))
    means = {"loss": mean(9.0, 2), "lm_loss": mean(NAN, 0), "sop_loss": mean(0.6, 2)}
    meter.add_micro_batch(means, info())
    meter.add_update(2, torch.tensor(1.0))
    measured = meter.read()
    assert measured.losses == [9.0, 9.0]
    assert measured.parts == pytest.approx({"lm_loss": 2.0, "sop_loss": (0.4 + 0.6) / 2})


def test_a_process_with_fillers_only_still_has_every_name() -> None:
    """All processes reduce the same numbers: one with fewer would wait for ever."""
    meter = make([])
    means = {"loss": mean(NAN, 0), "lm_loss": mean(NAN, 0)}
    meter.add_micro_batch(means, info().as_filler())
    meter.add_update(1, torch.tensor(1.0))
    measured = meter.read()
    assert (measured.losses, measured.parts) == ([0.0], {"lm_loss": 0.0})


def test_sums_become_means_over_everything() -> None:
    sums = WeightedSums(dtype=torch.float64)
    sums.add({"loss": mean(1.0, 3), "sop_loss": mean(2.0, 1)})
    sums.add({"loss": mean(5.0, 1), "sop_loss": mean(6.0, 3)})
    sums.add({"loss": mean(NAN, 0), "sop_loss": mean(5.0, 0)})
    assert sums.read_means(Topology()) == {"loss": 2.0, "sop_loss": 5.0}
