"""The time of an update, computed by hand from its work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rapidformer.config import Settings, resolve
from rapidformer.planning import timing
from rapidformer.planning.devices import Cluster, Device, parse_devices
from rapidformer.planning.parts import Collective, Load, Work
from rapidformer.planning.timing import count_updates, describe_seconds, estimate, estimate_run

DEVICE = Device(
    "round", 100, 100, 200, 10, 1000, 100, 10, host=10, matrix_share=1.0, memory_share=1.0
)
WORK = Work(
    blocks=Load(matrix_flops=75e12), rest=Load(), update_bytes=0.0, host_bytes=0.0,
    host_update_bytes=0.0, collectives=(), micro_batches=1, stages=1, tokens=1000.0, samples=10,
    is_captured=True,
)  # fmt: skip


def settle(world_size: int = 1, **given: object) -> Settings:
    return resolve(Settings(micro_batch_size=1, **given), world_size=world_size)  # type: ignore[arg-type]


def run(work: Work, count: int = 1, **given: object) -> timing.Timing:
    return estimate(work, settle(count, **given), Cluster(DEVICE, count), "bf16")


def test_products_and_bytes() -> None:
    found = run(replace(WORK, rest=Load(moved=840e9), update_bytes=840e9))
    assert found.parts == pytest.approx({"products": 1.0, "other kernels": 1.0, "optimizer": 1.0})
    assert found.step == pytest.approx(3.0)
    assert found.tokens_per_second == pytest.approx(1000 / 3)
    assert found.samples_per_second == pytest.approx(10 / 3)


def test_compiled_blocks_move_less() -> None:
    work = replace(WORK, rest=Load(moved=840e9))
    assert run(work, compile=True).parts["other kernels"] == pytest.approx(0.24)


def test_launches_show_unless_they_are_replayed() -> None:
    work = replace(WORK, rest=Load(operations=100_000))
    kernels = 1.0 + 100_000 * 3.9e-6
    assert run(work).step == pytest.approx(kernels)
    assert run(replace(work, is_captured=False)).step == pytest.approx(100_000 * 45e-6)


def test_exchanges_hide_behind_the_computation() -> None:
    # A ring over 4 ranks of a node: 2 x 3/4 of the bytes over 75 % of 100 GB/s.
    reduced = Collective(axis="data", kind="all_reduce", size=100e9, calls=0, ranks=4, per="update")
    shown = replace(WORK, collectives=(reduced,))
    assert run(shown, 4).parts["exchanges"] == pytest.approx(2.0)
    hidden = replace(WORK, collectives=(replace(reduced, is_hidden=True),))
    assert run(hidden, 4).parts["exchanges"] == pytest.approx(2.0 - 2 / 3)


def test_exchanges_between_nodes_share_the_network() -> None:
    sent = Collective(axis="data", kind="all_gather", size=150e9, calls=0, ranks=16)
    work = replace(WORK, collectives=(sent,))
    inside, between = 100, 10 * 8  # every rank of a node has its own link to the network
    expected = 15 / 16 * 150 / (min(inside, between) * 0.75)
    assert run(work, 16).parts["exchanges"] == pytest.approx(expected)


def test_a_pipeline_waits_for_its_first_and_last_stage() -> None:
    work = replace(WORK, micro_batches=4, stages=3)
    assert run(work).parts["pipeline bubble"] == pytest.approx(2.0)
    assert run(work).step == pytest.approx(6.0)


def test_the_length_of_a_run() -> None:
    found = run(WORK)
    settings = settle(global_batch_size=4, epochs=2.5)
    assert count_updates(settings, 10) == 3 + 3 + 2
    whole = estimate_run(found, settings, Cluster(DEVICE, 36), 10)
    assert whole is not None and whole.device_hours == pytest.approx(8 * 36 / 3600)
    assert count_updates(settle(train_iters=7), 0) == 7
    assert estimate_run(found, settle(epochs=1), parse_devices("H200"), 0) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.041, "41 ms"), (12.5, "12.5 s"), (2100, "35 min"), (11520, "3.2 h"), (354240, "4.1 days")],
)
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert describe_seconds(seconds) == text
