"""What the loader makes of data: rows by number, streams from a position, a user's own source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from datasets import IterableDataset as HubStream
from torch.utils.data import Dataset, IterableDataset

from rapidformer.data.data_source import DataSource, Rows, Stream, Take, open_source
from rapidformer.data.loader import DistributedLoader


class Numbers(IterableDataset[int]):
    """A shuffled stream: what it reads depends on the random numbers of the pass."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(20).tolist()


class TwoSets:
    """A mixture: even numbers are from one set, odd ones from another."""

    name = "two"
    fingerprint = "even and odd"
    size = 10

    def get_rows(self, numbers: Sequence[int]) -> list[Any]:
        return [100 * (number % 2) + number // 2 for number in numbers]

    def read(self, seed: int, epoch: int, position: int) -> Take:
        raise TypeError("no stream")

    def find_set(self, number: int) -> str:
        return ("even", "odd")[number % 2]


def build(dataset: Any, **options: Any) -> DistributedLoader:
    return DistributedLoader(dataset, collate=torch.tensor, micro_batch_size=4, **options)


def test_a_list_is_rows_and_a_generator_is_a_stream() -> None:
    rows, stream = open_source([5, 6, 7]), open_source(iter([5, 6, 7]))
    assert isinstance(rows, Rows) and rows.size == 3 and rows.get_rows([2, 0]) == [7, 5]
    assert isinstance(stream, Stream) and stream.size is None
    with pytest.raises(TypeError, match="is a stream"):
        stream.get_rows([1])


@pytest.mark.parametrize("position", [0, 1, 7, 20, 25])
def test_a_stream_is_read_from_a_position(position: int) -> None:
    whole = Stream(Numbers()).read(3, 1, 0)(100)
    assert sorted(whole) == list(range(20))
    assert Stream(Numbers()).read(3, 1, position)(100) == whole[position:]
    assert Stream(Numbers()).read(3, 2, 0)(100) != whole


class OfEpochs(Dataset[int]):
    """Other rows in each epoch, which the loader says."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> int:
        return 100 * self.epoch + number


class StreamOfEpochs(IterableDataset[int]):
    def __init__(self) -> None:
        self.rows = OfEpochs()
        self.set_epoch = self.rows.set_epoch

    def __iter__(self) -> Iterator[int]:
        return (self.rows[number] for number in range(6))


@pytest.mark.parametrize("make", [OfEpochs, StreamOfEpochs])
def test_a_data_set_is_told_the_epoch(make: Any) -> None:
    loader = build(make())
    passes = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert passes == [[[0, 1, 2, 3], [4, 5]], [[100, 101, 102, 103], [104, 105]]]
    resumed = build(make())
    resumed.load_state_dict({"epoch": 1, "consumed_samples": 4})
    assert [batch.tolist() for batch in resumed] == [[104, 105]]


def test_a_shuffled_stream_of_datasets_comes_in_another_order() -> None:
    rows = HubStream.from_generator(lambda: ({"x": i} for i in range(20)))
    loader = build(rows.shuffle(seed=1, buffer_size=20).map(lambda row: row))
    loader.collate_fn = lambda batch: [row["x"] for row in batch]
    first, second = ([number for batch in loader for number in batch] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_a_users_own_source() -> None:
    source = TwoSets()
    assert isinstance(source, DataSource)
    loader = build(source)
    batches = [batch.tolist() for batch in loader]
    assert batches == [[0, 100, 1, 101], [2, 102, 3, 103], [4, 104]]
    assert loader.num_samples == 10
    assert loader.list_sets([0, 2]) == ["even"]
    assert loader.list_sets(range(3)) == ["even", "odd"]
