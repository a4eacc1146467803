"""GPT samples from files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from rapidformer.data.indexed import open_indexed
from rapidformer.data.pretraining import build_train_valid_test_datasets
from rapidformer.data.pretraining.assemble import build_datasets
from rapidformer.errors import DataError

from .references import index_gpt_slowly
from .rig import make_documents, write_corpus


def build(prefix: str, num_samples: Any = (20, 0, 0), **changed: Any) -> Any:
    values = {"splits_string": "1", "seq_length": 9, "seed": 1234} | changed
    return build_train_valid_test_datasets(
        [prefix], "mmap", train_valid_test_num_samples=num_samples, skip_warmup=True, **values
    )


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus_text_sentence", make_documents(12))


def test_samples_are_the_tokens_of_the_shuffled_sequences(prefix: str) -> None:
    data = open_indexed(prefix)
    train, valid, test = build(prefix, (200, 0, 0))
    documents, _, order = index_gpt_slowly(data.sizes.tolist(), 200, 9, 1234)
    stream = np.concatenate([data[document] for document in documents])
    assert (valid, test) == (None, None)
    assert len(train) == len(order) >= 200
    for index in range(len(train)):
        start = order[index] * 9
        assert train[index]["text"].tolist() == stream[start : start + 10].tolist()


def test_split_divides_sequences_not_documents(prefix: str) -> None:
    data = open_indexed(prefix)
    train, valid, test = build(prefix, (None, None, None), splits_string="8,1,1")
    border = round(0.8 * len(data))
    assert len(train) == (sum(data.sizes[:border].tolist()) - 1) // 9
    seen = {int(token) for index in range(len(valid)) for token in valid[index]["text"]}
    assert seen <= {int(token) for sequence in data[border:] for token in sequence}
    assert len(test) > 0


def test_tokens_that_the_vocabulary_has_not_are_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "words", [[[3, 4, 5, 9, 3, 4]]])
    values = {"train_valid_test_num_samples": (3, 0, 0), "seq_length": 4, "seed": 1}
    enough, *_ = build_datasets("gpt", train_data_prefix=prefix, vocab_size=10, **values)
    assert len(enough.__getitems__([0, 1])) == 2
    short, *_ = build_datasets("gpt", train_data_prefix=prefix, vocab_size=9, **values)
    with pytest.raises(DataError, match="words has the token 9, but tokenizer and model have 9"):
        short.__getitems__([0, 1])


def test_empty_sequences_do_not_break_samples(tmp_path: Path) -> None:
    documents = [[[]], [[7, 8, 9]], [[]], [[]], [[10, 11]], [[12, 13, 14, 15]], [[]]]
    train, _, _ = build(write_corpus(tmp_path / "holes", documents), (8, 0, 0), seq_length=2)
    for sample in map(train.__getitem__, range(len(train))):
        assert sample["text"].shape == (3,)
        assert set(sample["text"].tolist()) <= set(range(7, 16))


def test_a_batch_is_its_samples_in_any_order(prefix: str) -> None:
    train, _, _ = build(prefix)
    wanted = [5, 0, 19, 5, 3]
    batch = train.__getitems__(wanted)
    assert [row["text"].tolist() for row in batch] == [train[i]["text"].tolist() for i in wanted]
    collated = default_collate(batch)["text"]
    assert collated.dtype == torch.int64
    assert collated.shape == (5, 10)


def test_pickled_data_sets_are_small_and_the_same(prefix: str) -> None:
    train, _, _ = build(prefix, (5000, 0, 0))
    pickled = pickle.dumps(train)
    again = pickle.loads(pickled)
    assert len(pickled) < 2000
    assert len(again) == len(train)
    assert again[4321]["text"].tolist() == train[4321]["text"].tolist()


def test_an_index_beyond_the_end_is_refused(prefix: str) -> None:
    train, _, _ = build(prefix)
    assert train[-1]["text"].tolist() == train[len(train) - 1]["text"].tolist()
    with pytest.raises(IndexError, match="sample 100000 of"):
        train[100_000]
    assert len(list(train)) == len(train)


def test_a_split_that_is_too_short_is_named(prefix: str) -> None:
    with pytest.raises(DataError, match=r"corpus_text_sentence, valid: the \d+ sequences hold"):
        build(prefix, (5, 5, 0), splits_string="99,2", seq_length=40)


def test_the_older_file_format_gives_the_same_samples(tmp_path: Path, prefix: str) -> None:
    data = open_indexed(prefix)
    legacy = tmp_path / "legacy"
    tokens = np.concatenate([data[i] for i in range(len(data))]).astype("<i4")
    offsets = np.concatenate([[0], np.cumsum(data.sizes)]).astype("<i8")
    header = np.array([1, 4, 4, len(data), len(data), data.doc_idx.size], dtype="<u8")
    arrays = [np.arange(len(data) + 1), offsets, data.sizes, data.doc_idx]
    Path(f"{legacy}.bin").write_bytes(tokens.tobytes())
    Path(f"{legacy}.idx").write_bytes(
        b"TNTIDX\0\0" + header.tobytes() + b"".join(a.astype("<i8").tobytes() for a in arrays)
    )
    ours, _, _ = build(prefix)
    theirs, _, _ = build_train_valid_test_datasets(
        str(legacy), "cached", "1", [20, 0, 0], 9, 1234, False
    )
    assert [row["text"].tolist() for row in ours] == [row["text"].tolist() for row in theirs]
