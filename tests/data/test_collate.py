from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertTokenizerFast,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)

from rapidformer.data.collate import PadCollator
from rapidformer.errors import DataError


def test_pads_to_the_longest_row() -> None:
    rows = [
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "label": 1, "text": "x"},
        {"input_ids": [8], "attention_mask": [1], "label": 0, "text": "y"},
    ]
    batch = PadCollator({"input_ids": 9})(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [1, 0] and batch["labels"].dtype == torch.int64
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_those_of_transformers_collators(side: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"), padding_side=side)
    for collate, make_label in (
        (DataCollatorWithPadding(tokenizer, pad_to_multiple_of=4), lambda count: count % 2),
        (DataCollatorForTokenClassification(tokenizer), lambda count: [1] * count),
        (DataCollatorForSeq2Seq(tokenizer), lambda count: [2] * (5 - count)),
    ):
        rows = [
            {"input_ids": [4] * count, "token_type_ids": [1] * count, "attention_mask": [1] * count,
             "labels": make_label(count)}
            for count in (3, 1, 2)
        ]  # fmt: skip
        ours = PadCollator(pad_to_multiple_of=collate.pad_to_multiple_of, side=side)(rows)
        theirs = collate([dict(row) for row in rows])
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            assert torch.equal(ours[name], values), (type(collate).__name__, name)


def test_token_labels_left_side_and_multiples() -> None:
    rows = [{"input_ids": [5, 6], "labels": [1, 2]}, {"input_ids": [7], "labels": [3]}]
    batch = PadCollator({}, pad_to_multiple_of=4, side="left")(rows)
    assert batch["input_ids"].tolist() == [[0, 0, 5, 6], [0, 0, 0, 7]]
    assert batch["labels"].tolist() == [[-100, -100, 1, 2], [-100, -100, -100, 3]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]


def test_lists_always_get_a_mask_and_equal_arrays_none() -> None:
    batch = PadCollator()([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}])
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 1]]
    rows = [{"input_ids": np.array([1, 2])}] * 2
    assert "attention_mask" not in PadCollator()(rows)
    assert PadCollator(pad_to_multiple_of=4)(rows)["attention_mask"].tolist() == [[1, 1, 0, 0]] * 2


def test_numbers_of_every_kind() -> None:
    rows = [
        {
            "score": 0.5,
            "flag": True,
            "vector": [1.0, 0.0],
            "mixed": [1, 0.5],
            "none": None,
            "count": 1,
        },
        {
            "score": 2,
            "flag": False,
            "vector": [0.0, 1.0],
            "mixed": [2, 3],
            "none": None,
            "count": 2.5,
        },
    ]
    batch = PadCollator()(rows)
    assert batch["score"].tolist() == [0.5, 2.0] and batch["score"].dtype == torch.float32
    assert batch["flag"].tolist() == [1, 0]
    assert batch["vector"].dtype == torch.float32 and batch["vector"].shape == (2, 2)
    assert batch["mixed"].tolist() == [[1.0, 0.5], [2.0, 3.0]]
    assert batch["count"].tolist() == [1.0, 2.5]
    assert "none" not in batch


def test_images_and_tensors_are_stacked() -> None:
    rows = [
        {"pixel_values": np.ones((3, 4, 4), np.float32), "x": torch.arange(3), "y": torch.ones(n)}
        for n in (1, 2)
    ]
    batch = PadCollator()(rows)
    assert batch["pixel_values"].shape == (2, 3, 4, 4)
    assert batch["x"].tolist() == [[0, 1, 2]] * 2
    assert batch["y"].tolist() == [[1.0, 0.0], [1.0, 1.0]]
    half = PadCollator()([{"pixel_values": np.ones((2, 2), np.float64)}] * 2)
    assert half["pixel_values"].shape == (2, 2, 2)


def test_choices_and_boxes() -> None:
    rows = [{"input_ids": [[1, 2], [3]]}, {"input_ids": [[4], [5, 6, 7]]}]
    batch = PadCollator({"input_ids": 9})(rows)
    assert batch["input_ids"].tolist() == [[[1, 2, 9], [3, 9, 9]], [[4, 9, 9], [5, 6, 7]]]
    boxes = [{"bbox": [[1, 2, 3, 4]]}, {"bbox": [[5, 6, 7, 8], [1, 1, 1, 1]]}]
    assert PadCollator()(boxes)["bbox"][0].tolist() == [[1, 2, 3, 4], [0, 0, 0, 0]]


def test_tuples_go_to_the_default() -> None:
    first, second = PadCollator()([(torch.ones(2), 1), (torch.zeros(2), 2)])
    assert first.shape == (2, 2) and second.tolist() == [1, 2]


def test_empty_rows() -> None:
    batch = PadCollator()([{"input_ids": []}, {"input_ids": [1]}])
    assert batch["input_ids"].tolist() == [[0], [1]]
    assert batch["attention_mask"].tolist() == [[0], [1]]


def test_unequal_nested_lists_are_reported() -> None:
    rows = [{"deep": [[[1], [2, 3]]]}, {"deep": [[[1]]]}]
    with pytest.raises(DataError, match=r"The column deep holds nested lists of unequal shape"):
        PadCollator()(rows)


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=5), st.booleans())
@settings(max_examples=100, deadline=None)
def test_equals_padding_by_hand(rows: list[list[int]], left: bool) -> None:
    collate = pickle.loads(
        pickle.dumps(PadCollator({"input_ids": 7}, side="left" if left else "right"))
    )
    width = max(map(len, rows))
    pads = [[7] * (width - len(row)) for row in rows]
    wanted = [pad + row if left else row + pad for row, pad in zip(rows, pads, strict=True)]
    assert collate([{"input_ids": row} for row in rows])["input_ids"].tolist() == wanted
