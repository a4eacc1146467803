"""Users' DataLoaders: what they were told carries over to any number of processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from rapidformer.data.adopting import adopt_loader
from rapidformer.data.loader import DistributedLoader
from rapidformer.errors import DataError
from rapidformer.log import get_logger, warn_once


def adopt(
    loader: DataLoader[Any], replicas: int = 1, replica: int = 0, seed: int = 1, **options: Any
) -> DistributedLoader:
    return adopt_loader(
        loader,
        num_replicas=replicas,
        replica=replica,
        seed=seed,
        device=torch.device("cpu"),
        **{"rounds_per_update": 1, **options},
    )


def take(loader: DistributedLoader) -> list[list[int]]:
    return [each.batch.tolist()[: each.info.rows] for each in loader.iterate_micro_batches()]


def take_all(loader: DataLoader[Any], replicas: int) -> list[int]:
    parts = [take(adopt(loader, replicas, replica)) for replica in range(replicas)]
    return [sample for rounds in zip(*parts, strict=True) for part in rounds for sample in part]


def test_what_the_loader_was_given_carries_over() -> None:
    def collate(rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows) * 10

    loader = DataLoader(range(7), batch_size=3, collate_fn=collate, drop_last=True)
    adopted = adopt(loader)
    assert adopted.dataset is loader.dataset
    assert adopted.collate_fn is collate
    assert adopted.batch_size == 3
    assert take(adopted) == [[0, 10, 20], [30, 40, 50]]


def test_a_dropped_batch_takes_no_other_of_its_update_with_it() -> None:
    loader = DataLoader(range(11), batch_size=2, drop_last=True)
    adopted = adopt(loader, rounds_per_update=2)
    assert (len(adopted), adopted.updates_per_epoch) == (5, 3)
    assert take(adopted) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_sequential_loader_keeps_its_order(replicas: int) -> None:
    loader = DataLoader(range(10), batch_size=2)
    assert isinstance(loader.sampler, SequentialSampler)
    assert take_all(loader, replicas) == list(range(10))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_shuffled_loader_is_shuffled_alike_on_every_process(replicas: int) -> None:
    loader = DataLoader(range(24), batch_size=2, shuffle=True)
    seen = take_all(loader, replicas)
    assert sorted(seen) == list(range(24))
    assert seen != list(range(24))
    assert seen == take_all(loader, 1)


class Backwards(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize("replicas", [1, 2])
def test_own_sampler_decides_the_order(replicas: int) -> None:
    loader = DataLoader(range(7), batch_size=2, sampler=Backwards(7))
    assert take_all(loader, replicas) == [6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_sampler_of_a_part_of_the_data(replicas: int) -> None:
    """The epoch is as long as the sampler, not as the data set."""
    loader = DataLoader(range(100), batch_size=2, sampler=SubsetRandomSampler([3, 5, 7, 9, 11]))
    torch.manual_seed(0)
    assert sorted(take_all(loader, replicas)) == [3, 5, 7, 9, 11]


def test_length_is_that_of_the_sampler() -> None:
    loader = DataLoader(range(100), batch_size=2, sampler=Backwards(5))
    assert len(adopt(loader)) == 3
    assert adopt(loader).updates_per_epoch == 3


def test_sampler_that_gives_more_than_the_data_set_holds() -> None:
    sampler = WeightedRandomSampler([1.0, 1.0, 1.0], num_samples=10)
    assert len(take_all(DataLoader(range(3), batch_size=2, sampler=sampler), 1)) == 10


def test_random_sampler_with_replacement_keeps_its_number_of_samples() -> None:
    sampler = RandomSampler(range(4), replacement=True, num_samples=9)
    assert len(take_all(DataLoader(range(4), batch_size=2, sampler=sampler), 1)) == 9


def test_random_sampler_of_the_users_is_the_same_on_every_process() -> None:
    """Processes have other global random numbers (dropout): the order must not follow them."""
    loader = DataLoader(range(20), batch_size=2, sampler=SubsetRandomSampler(range(20)))
    parts = []
    for replica in range(2):
        torch.manual_seed(1234 + replica)
        parts.append(take(adopt(loader, 2, replica)))
    seen = [sample for part in parts for batch in part for sample in batch]
    assert sorted(seen) == list(range(20))


def test_own_sampler_leaves_the_models_random_numbers_alone() -> None:
    loader = adopt(DataLoader(range(20), batch_size=2, sampler=SubsetRandomSampler(range(20))))
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


def test_resuming_an_own_random_sampler_continues_in_the_same_order() -> None:
    loader = DataLoader(range(20), batch_size=2, sampler=SubsetRandomSampler(range(20)))
    torch.manual_seed(0)
    whole = take(adopt(loader))
    torch.manual_seed(1)
    resumed = adopt(loader)
    resumed.load_state_dict({"epoch": 0, "consumed_samples": 6})
    assert take(resumed) == whole[3:]


def test_torchs_own_batch_sampler_is_cut_like_a_batch_size() -> None:
    made = DataLoader(range(8), batch_sampler=BatchSampler(Backwards(8), 2, drop_last=False))
    asked = DataLoader(range(8), batch_size=2, sampler=Backwards(8))
    for replica in range(2):
        assert take(adopt(made, 2, replica)) == take(adopt(asked, 2, replica))


class Lengths(Sampler[list[int]]):
    """Batches of unequal sizes, in a random order."""

    batch_size = 3

    def __init__(self, length: int = 4) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2], [3], [4, 5], [6, 7]]
        yield from (batches[int(number)] for number in torch.randperm(4))


def test_batches_of_the_users_making_are_dealt_out_whole() -> None:
    def make(**options: Any) -> Any:
        return DataLoader(range(8), batch_sampler=Lengths(), **options)  # type: ignore[arg-type]

    def list_batches(loader: DistributedLoader) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    alone = adopt(make())
    epochs = [list_batches(alone) for _ in range(2)]
    assert len(alone) == 4 and sorted(n for each in epochs[0] for n in each) == list(range(8))
    assert sorted(map(len, epochs[0])) == [1, 2, 2, 3] and epochs[0] != epochs[1]
    parts = [adopt(make(num_workers=replica), 2, replica) for replica in range(2)]
    for epoch in epochs:
        first, second = (list_batches(part) for part in parts)
        assert [first[0], second[0], first[1], second[1]] == epoch
    resumed = adopt(make())
    resumed.load_state_dict({"epoch": 1, "consumed_samples": 1})
    assert list_batches(pickle.loads(pickle.dumps(resumed))) == epochs[1][1:]
    whole = DataLoader(range(8), batch_size=None)  # type: ignore[arg-type]
    assert list(adopt(whole, 2, 1)) == [1, 3, 5, 7]


def test_batches_that_cannot_be_dealt_out_are_refused() -> None:
    short = DataLoader(range(8), batch_sampler=Lengths(3))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="Lengths gave 4 batches, and its length is 3"):
        list(adopt(short))
    loader = DataLoader(range(8), batch_sampler=Lengths())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="Lengths gives each process another order"):
        list(adopt(loader, 2, gather_digests=lambda digest: [digest, "another"]))
    cut = DistributedSampler(list(range(8)), num_replicas=2, rank=0)

    class Own(BatchSampler):
        """Not torch's own."""

    with pytest.raises(DataError, match="made from a DistributedSampler"):
        adopt(DataLoader(range(8), batch_sampler=Own(cut, 2, False)))  # type: ignore[arg-type]


@pytest.mark.parametrize("drops", [False, True])
def test_what_a_distributed_sampler_orders_is_not_cut_twice(drops: bool) -> None:
    """A script for torchrun has one already; each update has the rows that it has with DDP."""
    rows: Any = range(7)
    samplers = [DistributedSampler[int](rows, 2, rank, drop_last=drops) for rank in range(2)]
    loaders = [DataLoader[int](rows, batch_size=2, sampler=sampler) for sampler in samplers]
    adopted = [adopt(loader, 2, replica) for replica, loader in enumerate(loaders)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        theirs = [
            {*first.tolist(), *second.tolist()} for first, second in zip(*loaders, strict=True)
        ]
        ours = [{*first, *second} for first, second in zip(*map(take, adopted), strict=True)]
        assert ours[0] == theirs[0]
        assert ours[1] == theirs[1] - theirs[0]  # a row that fills up is left out
        assert len(ours[0] | ours[1]) == (6 if drops else 7)


def test_a_sampler_that_divides_the_data_is_refused() -> None:
    """The rows would be divided twice."""
    own = DataLoader(range(8), batch_size=2, sampler=Backwards(8))  # type: ignore[var-annotated]
    with pytest.raises(DataError, match="Backwards gives each process another order: it divides"):
        list(adopt(own, 2, gather_digests=lambda digest: [digest, "another"]))

    class Own(DistributedSampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([0, 1])

    with pytest.raises(DataError, match="Own divides the data in its own way"):
        adopt(DataLoader(range(8), sampler=Own(range(8), 2, 0)), 2)  # type: ignore[arg-type]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize("replicas", [1, 2])
def test_stream_is_spread_over_processes(replicas: int) -> None:
    assert take_all(DataLoader(Stream(), batch_size=2), replicas) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("base", [RandomSampler, SequentialSampler])
def test_a_sampler_derived_from_torchs_decides_the_order(base: Any) -> None:
    class Backwards(base):
        def __iter__(self) -> Iterator[int]:
            return iter(range(len(self) - 1, -1, -1))

    loader = DataLoader(range(5), batch_size=2, sampler=Backwards(range(5)))
    assert take(adopt(loader)) == [[4, 3], [2, 1], [0]]


def test_a_generator_that_is_not_followed_is_said(caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    warn_once.cache_clear()
    adopt(DataLoader(range(5), shuffle=True))
    assert not caplog.text
    adopt(DataLoader(range(5), shuffle=True, generator=torch.Generator().manual_seed(3)))
    assert "follows --seed (or --data-seed), not the DataLoader's generator" in caplog.text


def test_a_data_set_that_grows_is_refused() -> None:
    rows = list(range(4))
    adopted = adopt(DataLoader(rows, batch_size=2))
    assert take(adopted) == [[0, 1], [2, 3]]
    rows += [4, 5]
    with pytest.raises(DataError, match=r"list has 6 rows now, and had 4 .*adopt_loader"):
        take(adopted)
    assert take(adopt(DataLoader(rows, batch_size=2))) == [[0, 1], [2, 3], [4, 5]]
