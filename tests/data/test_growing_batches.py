"""Updates of a growing size, counts known ahead, and a loader that does not list its epoch."""

from __future__ import annotations

import tracemalloc
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from rapidformer.config.batches import BatchSchedule
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.update import UPDATE_COUNTS
from rapidformer.dist.collectives import sum_over_rows
from rapidformer.dist.processes import start_processes
from rapidformer.dist.topology import build_topology
from rapidformer.errors import DataError
from tests.processes import run_in_processes

RAMP = BatchSchedule(final=8, start=2, increment=2, ramp_samples=24)


class Rows(Dataset[int]):
    """Row i has i % 3 + 1 labels."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def collate(rows: list[int]) -> dict[str, torch.Tensor]:
    labels = torch.full((len(rows), 3), -100)
    for line, row in zip(labels, rows, strict=True):
        line[: row % 3 + 1] = row
    return {"rows": torch.tensor(rows), "labels": labels}


def build(count: int = 100, **options: Any) -> DistributedLoader:
    options = {"collate": collate, "micro_batch_size": 1, "rounds_per_update": 8, **options}
    return DistributedLoader(Rows(count), **options)


def take_updates(loader: DistributedLoader, limit: int) -> list[list[int]]:
    updates = []
    for update in islice(loader.iterate_updates(), limit):
        updates.append([row for each in update for row in each.batch["rows"].tolist()])
    return updates


def test_updates_grow_as_the_schedule_says() -> None:
    updates = take_updates(build(get_batch_size=RAMP.get_size), 9)
    assert [len(update) for update in updates] == [2, 2, 2, 2, 4, 4, 6, 6, 8]
    assert [row for update in updates for row in update] == list(range(36))


def test_growth_is_the_same_on_any_number_of_processes_and_continues_after_resuming() -> None:
    whole = take_updates(build(get_batch_size=RAMP.get_size), 20)
    for resumed_at in range(1, 9):
        consumed = sum(len(update) for update in whole[:resumed_at])
        parts = []
        for replica in range(2):
            loader = build(
                num_replicas=2, replica=replica, rounds_per_update=4, get_batch_size=RAMP.get_size
            )
            loader.load_state_dict({"epoch": 0, "consumed_samples": consumed})
            parts.append(take_updates(loader, 20 - resumed_at))
        joined = [sorted(a + b) for a, b in zip(*parts, strict=True)]
        assert joined == whole[resumed_at:]


def test_second_epoch_does_not_start_small_again() -> None:
    loader = build(28, get_batch_size=RAMP.get_size)
    first, second = take_updates(loader, 100), take_updates(loader, 2)
    assert [len(update) for update in first] == [2, 2, 2, 2, 4, 4, 6, 6]
    assert [len(update) for update in second] == [8, 8]


def test_counts_of_an_update_are_known_from_its_first_round_on() -> None:
    loader = build(13, micro_batch_size=2, rounds_per_update=2, sum_counts=lambda counts: counts)
    seen = []
    for update in loader.iterate_updates():
        rows = sum(len(each.batch["rows"]) for each in update)
        labels = sum(int((each.batch["labels"] != -100).sum()) for each in update)
        seen += [each.batch[UPDATE_COUNTS].tolist() == [rows, labels] for each in update]
    assert seen == [True] * 7


def _count_ahead() -> list[tuple[int, int, int]]:
    processes = start_processes(device="cpu")
    topology = build_topology("cpu", data=2)
    loader = build(
        11,
        num_replicas=2,
        replica=processes.rank,
        rounds_per_update=2,
        sum_counts=partial(sum_over_rows, topology=topology),
    )
    totals = []
    for each in loader.iterate_micro_batches():
        totals.append((each.info.labels, *each.batch[UPDATE_COUNTS].tolist()))
    return totals


def test_counts_ahead_are_those_of_all_processes() -> None:
    first, second = run_in_processes(_count_ahead, 2)
    assert [total[1:] for total in first] == [total[1:] for total in second]
    assert sum(labels for labels, _, _ in first + second) == sum(i % 3 + 1 for i in range(11))
    assert {total[1:] for total in first} == {(4, 7), (4, 8), (3, 6)}


def test_a_huge_epoch_is_never_listed() -> None:
    """A hundred million samples: their order must cost no memory to begin with."""
    loader = build(100_000_000, micro_batch_size=4)
    tracemalloc.start()
    assert next(iter(loader))["rows"].tolist() == [0, 1, 2, 3]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


class Broken(Rows):
    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise DataError("row 3 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_wrong_with_the_data_comes_without_a_workers_traceback(num_workers: int) -> None:
    loader = DistributedLoader(
        Broken(6), collate=collate, micro_batch_size=2, num_workers=num_workers
    )
    rounds = iter(loader)
    assert next(rounds)["rows"].tolist() == [0, 1]
    with pytest.raises(DataError, match=r"^row 3 is broken$"):
        next(rounds)
