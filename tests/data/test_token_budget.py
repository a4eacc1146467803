"""--tokens-per-micro-batch: the same samples in every update, divided by their lengths."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from rapidformer.data.loader import DistributedLoader
from rapidformer.data.rounds import split_by_tokens
from rapidformer.errors import DataError

LENGTHS = [3, 9, 1, 7, 5, 5, 2, 8, 6, 4, 3]


def measure(part: list[int], lengths: list[int]) -> int:
    """Tokens of a micro-batch, with padding."""
    return len(part) * max((lengths[i] for i in part), default=0)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=30),
    budget=st.integers(1, 60),
    ranks=st.integers(1, 4),
)
def test_micro_batches_of_an_update(lengths: list[int], budget: int, ranks: int) -> None:
    parts = split_by_tokens(lengths, budget, ranks)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert len(parts) % ranks == 0
    limit = max(budget, *lengths)
    assert all(measure(part, lengths) <= limit for part in parts)
    fewest = len(split_by_tokens(lengths, budget, 1))
    assert len(parts) == -(-fewest // ranks) * ranks, "no more than it takes"
    if len(lengths) >= len(parts):
        assert all(parts), "nobody waits while others work"


def test_ranks_are_balanced() -> None:
    lengths = [10] * 60
    parts = split_by_tokens(lengths, 1000, 4)
    assert [len(part) for part in parts] == [15] * 4
    parts = split_by_tokens(lengths, 250, 2)
    assert sorted(map(len, parts)) == [15] * 4, "four of 15, not three of 25, 25 and 10"


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return iter(make_rows())


def make_rows() -> list[dict[str, Any]]:
    return [{"input_ids": [number] * length} for number, length in enumerate(LENGTHS)]


def collate(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([row["input_ids"][0] for row in rows])


def build(kind: str = "rows", replicas: int = 1, replica: int = 0, **more: Any) -> Any:
    return DistributedLoader(
        Stream() if kind == "stream" else make_rows(), collate=collate,
        micro_batch_size=4 // replicas, num_replicas=replicas, replica=replica, token_budget=12,
        lengths=None if kind == "stream" else LENGTHS, **more,
    )  # fmt: skip


def take(loader: Any, limit: int = 99) -> list[list[int]]:
    """The samples of each update; on one rank."""
    found = []
    for update in loader.iterate_updates():
        rows = [n for each in update if not each.is_filler for n in each.batch.tolist()]
        found.append(sorted(rows))
        if len(found) == limit:
            break
    return found


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_updates_take_the_samples_they_always_take(kind: str) -> None:
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert take(build(kind)) == expected
    joined = [take(build(kind, 2, rank)) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*joined, strict=True)] == expected
    assert take(build(kind, drop_last=True)) == expected[:2]


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_ranks_run_equally_often(kind: str) -> None:
    updates = [list(build(kind, 2, rank).iterate_updates()) for rank in range(2)]
    assert [len(update) for update in updates[0]] == [len(update) for update in updates[1]]


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_a_run_resumes_after_its_last_update(kind: str) -> None:
    options = {"shuffle": kind == "rows", "seed": 4}
    loader, later = build(kind, **options), build(kind, **options)
    first = take(loader, limit=1)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["consumed_samples"] == 4
    later.load_state_dict(state)
    assert first + take(later) == take(build(kind, **options))
    assert later.epoch == 1


def test_updates_that_grow() -> None:
    loader = build(get_batch_size=lambda consumed: 4 if consumed < 4 else 7)
    assert [len(update) for update in take(loader)] == [4, 7]


def test_its_length_is_counted_in_updates() -> None:
    loader = build()
    assert loader.updates_per_epoch == 3
    with pytest.raises(TypeError, match="count optimizer steps"):
        len(loader)


def test_samples_without_tokens_are_refused() -> None:
    loader = DistributedLoader(
        type("Pixels", (Stream,), {"__iter__": lambda self: iter([{"pixels": 1}])})(),
        collate=collate, micro_batch_size=1, token_budget=8,
    )  # fmt: skip
    with pytest.raises(DataError, match="no input_ids to count"):
        take(loader)
