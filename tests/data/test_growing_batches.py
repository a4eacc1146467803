"""Updates of a growing size, and a loader that does not list its epoch."""

from __future__ import annotations

import tracemalloc
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from rapidformer.config.derive import BatchSchedule
from rapidformer.data.loader import DistributedLoader
from rapidformer.errors import DataError

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
