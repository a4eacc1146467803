"""--group-by-length: neighbours of similar length, every sample once."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch

from rapidformer import RapidformerEngine
from rapidformer.data.rounds import GroupedOrder, measure_lengths
from rapidformer.errors import DataError


def test_every_sample_once_and_similar_lengths_together() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(1, 100, (400,)).tolist()
    order = GroupedOrder(lengths, batch_size=4)()
    assert sorted(order) == list(range(400))
    assert lengths[order[0]] == max(lengths)
    spread = [max(b) - min(b) for b in _cut([lengths[i] for i in order], 4)]
    plain = [max(b) - min(b) for b in _cut(lengths, 4)]
    assert sum(spread) * 4 < sum(plain)


def _cut(values: list[int], size: int) -> list[list[int]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def test_lengths_from_a_column_from_tokens_and_from_rows() -> None:
    rows = [{"input_ids": [1] * n, "size": 7 - n} for n in (3, 1, 2)]
    data = datasets.Dataset.from_list(rows)
    assert measure_lengths(data, "size") == measure_lengths(list(data), "size") == [4, 6, 5]
    assert measure_lengths([{"idx": torch.ones(3)}, {"idx": [1]}], "idx") == [3, 1]
    assert measure_lengths(data, "length") == measure_lengths(rows, "length") == [3, 1, 2]
    texts = datasets.Dataset.from_list([{"text": "two words", "length": "2"}])
    assert measure_lengths(texts, "length") == [2]
    with pytest.raises(DataError, match="text: 'two words' is neither a length nor a list of"):
        measure_lengths(texts, "text")
    with pytest.raises(DataError, match="neither a column 'length' nor input_ids"):
        measure_lengths([{"x": 1}], "length")


def test_the_loader_uses_it_with_another_order_each_epoch() -> None:
    rows: Any = [{"input_ids": [1] * (1 + i % 9), "labels": i} for i in range(36)]
    engine = RapidformerEngine(
        args={"micro_batch_size": 4, "group_by_length": True, "log_level": "error"}
    )
    loader = engine.data.build_loader(rows, shuffle=True, is_training=True)
    first, second = ([i for b in loader for i in b["labels"].tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(36))
    assert first != second
