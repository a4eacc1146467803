"""What a batch is counted as: the weight of its loss depends on it."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from rapidformer.data.batch import BatchInfo, copy_batch, describe_batch, move_to_device
from rapidformer.data.nested import iterate_tensors

IDS = torch.ones(2, 4, dtype=torch.long)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
CLASSES = torch.tensor([0, 1])
TOKEN_LABELS = torch.tensor([[5, -100, 7, 8], [-100, 3, -100, -100]])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        # rows, labels, shifted labels, tokens, slots
        ({"input_ids": IDS, "attention_mask": MASK, "labels": TOKEN_LABELS}, (2, 4, 3, 6, 8)),
        ({"input_ids": IDS, "attention_mask": MASK, "labels": CLASSES}, (2, 2, 2, 6, 8)),
        ({"input_ids": IDS, "labels": torch.tensor([0, -100])}, (2, 1, 1, 8, 8)),
        ({"input_ids": IDS, "labels": torch.tensor([0.5, 1.5])}, (2, 2, 2, 8, 8)),
        ({"input_ids": IDS, "labels": torch.zeros(2, 5)}, (2, 2, 2, 8, 8)),
        ({"input_ids": IDS, "labels": torch.full((2, 4), -100)}, (2, 0, 0, 8, 8)),
        ({"input_ids": IDS, "labels": IDS}, (2, 8, 6, 8, 8)),
        (
            {"input_ids": IDS, "labels": IDS, "shift_labels": TOKEN_LABELS},
            (2, 4, 4, 8, 8),
        ),
        ({"input_ids": IDS}, (2, 2, 2, 8, 8)),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)}, (2, 2, 2, 8, 8)),
        (
            {
                "input_ids": torch.ones(2, 3, 4, dtype=torch.long),
                "attention_mask": torch.ones(2, 3, 4, dtype=torch.long),
                "labels": torch.tensor([0, 2]),
            },
            (2, 2, 2, 24, 24),
        ),
        (
            {"pixel_values": torch.zeros(3, 1, 2, 2), "labels": torch.tensor([0, 1, 0])},
            (3, 3, 3, 0, 0),
        ),
        ({"note": "text", "x": torch.zeros(3, 2)}, (3, 3, 3, 0, 0)),
        ((torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)), (3, 3, 3, 0, 0)),
        ([torch.zeros(3, 2)], (3, 3, 3, 0, 0)),
        ({}, (0,) * 5),
        ("text", (0,) * 5),
        (torch.zeros(4, 2), (4, 4, 4, 0, 0)),
        (({"a": torch.zeros(())}, torch.zeros(2, 1)), (2, 2, 2, 0, 0)),
        ({"idx": IDS, "targets": IDS}, (2, 2, 2, 8, 8)),
        ((IDS, IDS), (2, 2, 2, 8, 8)),
    ],
    ids=[
        "token labels", "class labels", "ignored class", "floats", "float rows", "all ignored",
        "language model", "shifted by the collator", "no labels", "4-d mask", "multiple choice",
        "images", "odd values", "tuple", "list", "empty", "text", "tensor", "nested",
        "custom names", "pair of ids",
    ],
)  # fmt: skip
def test_counts(batch: Any, expected: tuple[int, ...]) -> None:
    info = describe_batch(batch)
    assert tuple(info) == expected
    assert all(type(number) is int for number in info)


def test_hugging_faces_batches_are_counted_like_dictionaries() -> None:
    content = {"input_ids": IDS, "attention_mask": MASK, "labels": TOKEN_LABELS}
    assert describe_batch(BatchEncoding(content)) == describe_batch(content)


def test_filler_weighs_nothing_but_takes_its_slots() -> None:
    info = BatchInfo(rows=2, labels=4, shifted_labels=3, tokens=6, slots=8).as_filler()
    assert info == BatchInfo(rows=0, labels=0, shifted_labels=0, tokens=0, slots=8)


def test_tensors_of_nested_batches() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = list(iterate_tensors({"x": a, "y": [b, ("no", {"z": c})], "n": 3}))
    assert [id(t) for t in found] == [id(a), id(b), id(c)]


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2),
        {"a": torch.ones(2), "b": "text"},
        [torch.ones(2), {"a": torch.ones(1)}],
        (torch.ones(2), 3),
        Pair(torch.ones(2), [torch.ones(1)]),
        BatchEncoding({"input_ids": IDS}),
        defaultdict(list, a=torch.ones(2)),
    ],
    ids=["tensor", "dict", "list", "tuple", "namedtuple", "BatchEncoding", "defaultdict"],
)
def test_copying_and_moving_keep_the_type(batch: Any) -> None:
    copied = copy_batch(batch, pins=False)
    assert type(copied) is type(batch)
    for mine, theirs in zip(iterate_tensors(copied), iterate_tensors(batch), strict=True):
        assert torch.equal(mine, theirs) and mine.data_ptr() != theirs.data_ptr()
    meta = torch.device("meta")
    moved = move_to_device(batch, meta)
    assert type(moved) is type(batch)
    tensors = list(iterate_tensors(moved))
    assert len(tensors) == len(list(iterate_tensors(batch)))
    assert all(tensor.device == meta for tensor in tensors)
    assert move_to_device(batch, torch.device("cpu")) is batch


def test_moving_an_encoding_keeps_what_it_knows_and_leaves_the_old_one_alone() -> None:
    batch = BatchEncoding({"input_ids": IDS}, n_sequences=2)
    moved = move_to_device(batch, torch.device("meta"))
    assert moved.n_sequences == 2 and moved.input_ids.device.type == "meta"
    assert batch["input_ids"] is IDS


def test_memory_that_is_pinned_already_is_copied_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # as torch does then
    memory = torch.ones(2)
    copied = copy_batch({"x": memory}, pins=True)
    memory.zero_()
    assert copied["x"].tolist() == [1, 1]


class Shared(MutableMapping[str, torch.Tensor]):
    """Its copies share their entries."""

    def __init__(self, entries: dict[str, torch.Tensor]) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.entries[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def test_moving_does_not_change_the_original() -> None:
    batch = Shared({"x": torch.ones(2)})
    moved = move_to_device(batch, torch.device("meta"))
    assert (moved["x"].device.type, batch["x"].device.type) == ("meta", "cpu")


class Attributes(dict[str, torch.Tensor]):
    """A widespread recipe for entries that are attributes, too."""

    def __init__(self, **entries: torch.Tensor) -> None:
        super().__init__(entries)
        self.__dict__ = self


def test_attributes_that_are_entries_move_with_them() -> None:
    moved = move_to_device(Attributes(x=torch.ones(2)), torch.device("meta"))
    assert moved.x is moved["x"] and moved.x.device.type == "meta"
