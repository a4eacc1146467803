from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer.data.batch import describe_batch
from rapidformer.data.collate import PadCollator
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.packing import PackedRows, pack_lengths

EXAMPLES: list[dict[str, Any]] = [
    {"input_ids": [10, 11, 12], "labels": [-100, 11, 12]},
    {"input_ids": [20, 21], "labels": [20, 21]},
    {"input_ids": [30, 31, 32, 33], "labels": [-100, -100, 32, 33]},
    {"input_ids": [40], "labels": [-100]},
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_every_example_is_in_one_row_that_has_room(lengths: list[int], capacity: int) -> None:
    rows = pack_lengths(lengths, capacity)
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))
    filled = [sum(lengths[n] for n in row) for row in rows]
    assert all(size <= capacity for size in filled)
    # Any two rows together would not fit into one: otherwise the later would not have been begun.
    smallest = sorted(filled)[:2]
    assert len(rows) < 2 or sum(smallest) > capacity
    assert rows == pack_lengths(lengths, capacity)
    assert rows == sorted(rows) and all(row == sorted(row) for row in rows)


def test_the_fullest_row_with_room_is_taken() -> None:
    # 6 and 5 open rows of their own; 4 belongs to the 6, 3 to the 5, 2 to that too.
    assert pack_lengths([2, 3, 4, 5, 6], 10) == [[0, 1, 3], [2, 4]]
    assert pack_lengths([7, 7, 3], 10) == [[0], [1, 2]]
    assert pack_lengths([], 10) == []
    with pytest.raises(ValueError, match="an example of 11 tokens in rows of 10"):
        pack_lengths([3, 11], 10)


def test_positions_start_again_and_no_label_crosses_a_border() -> None:
    rows = PackedRows(EXAMPLES, [[0, 1], [2, 3]])
    assert len(rows) == 2
    assert rows[0] == {
        "input_ids": [10, 11, 12, 20, 21],
        "labels": [-100, 11, 12, -100, 21],
        "position_ids": [0, 1, 2, 0, 1],
    }
    assert rows[-1] == rows.__getitems__([1])[0]
    assert pickle.loads(pickle.dumps(rows))[1] == rows[1]
    with pytest.raises(IndexError):
        rows[2]
    unlabelled = PackedRows([{"input_ids": row["input_ids"]} for row in EXAMPLES], [[0, 1]])
    assert unlabelled[0]["labels"] == [-100, 11, 12, -100, 21]


def test_a_table_on_disk_gives_the_same_rows() -> None:
    import datasets

    table = datasets.Dataset.from_list(EXAMPLES)
    packed = [[0, 3], [1, 2]]
    assert list(PackedRows(table, packed)) == list(PackedRows(EXAMPLES, packed))


def test_the_loader_shuffles_rows_and_counts_what_the_model_averages_over() -> None:
    examples = [{"input_ids": [n] * (2 + n % 3), "labels": [n] * (2 + n % 3)} for n in range(40)]
    rows = PackedRows(examples, pack_lengths([len(e["input_ids"]) for e in examples], 8))

    def read(epoch: int) -> list[tuple[int, ...]]:
        loader = DistributedLoader(
            rows,
            collate=PadCollator({"input_ids": 99}),
            micro_batch_size=2,
            shuffle=True,
            seed=epoch,
        )
        seen = []
        for micro_batch in loader.iterate_micro_batches():
            batch, info = micro_batch.batch, micro_batch.info
            # A packed example of n tokens has n - 1 predictions.
            starts = int((batch["position_ids"] == 0)[batch["attention_mask"] == 1].sum())
            tokens = int(batch["attention_mask"].sum())
            assert info.shifted_labels == info.labels == tokens - starts
            assert info.tokens == tokens
            seen += [tuple(row) for row in batch["input_ids"].tolist()]
        return seen

    first, second = read(0), read(1)
    assert first != second
    assert {tuple(t for t in row if t != 99) for row in first} == {
        tuple(t for t in row if t != 99) for row in second
    }


def test_padding_is_not_part_of_a_packed_batch() -> None:
    batch = PadCollator({"input_ids": 99})(list(PackedRows(EXAMPLES, [[0, 1], [3]])))
    assert batch["input_ids"].tolist()[1] == [40, 99, 99, 99, 99]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 0, 0, 0, 0]]
    assert batch["labels"][1].unique().tolist() == [-100]
    info = describe_batch(batch)
    assert (info.labels, info.shifted_labels, info.tokens, info.slots) == (3, 3, 6, 10)
