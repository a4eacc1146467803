"""BERT samples: equal to a plain reference, and true to what masking promises."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from rapidformer.data.indexed import open_indexed
from rapidformer.data.pretraining import build_train_valid_test_datasets_for_huggingface
from rapidformer.data.pretraining.sentence_samples import BertDataset, BertTokens, truncate_pair
from rapidformer.data.tokenizers import Tokenizer
from rapidformer.errors import DataError

from .references import find_words_slowly, make_bert_slowly
from .rig import SPECIAL, make_documents, make_tokenizer, write_corpus

LENGTH = 32


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    return write_corpus(folder / "corpus_text_sentence", make_documents(60))


def make_rows(*rows: tuple[int, int, int]) -> dict[str, np.ndarray]:
    return {"rows": np.array(rows, dtype=np.uint32)}


def make_dataset(data: Any, maps: Any, tokenizer: Tokenizer, **changed: Any) -> BertDataset:
    values = {"max_seq_length": LENGTH, "masked_lm_prob": 0.15, "seed": 1234} | changed
    return BertDataset(data, maps, BertTokens.of(tokenizer), **values)


def build(prefix: str, tokenizer: Any, num_samples: Any = (300, 0, 0), **changed: Any) -> Any:
    values = {
        "splits_string": "1", "max_seq_length": LENGTH, "masked_lm_prob": 0.15,
        "short_seq_prob": 0.1, "seed": 1234, "binary_head": True,
    }  # fmt: skip
    return build_train_valid_test_datasets_for_huggingface(
        prefix,
        "mmap",
        train_valid_test_num_samples=num_samples,
        skip_warmup=True,
        tokenizer=tokenizer,
        **(values | changed),
    )


@pytest.mark.parametrize("binary_head", [True, False])
@pytest.mark.parametrize("mask_prob", [0.15, 0.0, 0.6, 0.02])
def test_samples_are_those_drawn_one_number_at_a_time(
    prefix: str, tokenizer: Tokenizer, mask_prob: float, binary_head: bool
) -> None:
    data = open_indexed(prefix)
    random = np.random.default_rng(0)
    rows = [
        (start, start + int(random.integers(2, 7)), int(random.integers(2, LENGTH - 2)))
        for start in random.integers(0, len(data) - 7, 60).tolist()
    ]
    dataset = make_dataset(
        data, make_rows(*rows), tokenizer, masked_lm_prob=mask_prob, binary_head=binary_head
    )
    for index, (start, end, target) in enumerate(rows):
        expected = make_bert_slowly(
            [sentence.tolist() for sentence in data[start:end]],
            target,
            tokenizer,
            length=LENGTH,
            mask_prob=mask_prob,
            seed=1234 + index,
            binary_head=binary_head,
        )
        sample = dataset[index]
        assert list(sample) == list(expected)
        for key, value in expected.items():
            assert np.asarray(sample[key]).tolist() == value, (index, key)


def test_a_sample_by_hand(tokenizer: Tokenizer) -> None:
    """Two sentences, nothing hidden: only whether they are swapped is drawn."""
    data = [np.array([10, 11], dtype=np.uint16), np.array([13], dtype=np.uint16)]
    dataset = make_dataset(
        data, make_rows(*[(0, 2, 20)] * 10), tokenizer, masked_lm_prob=0.0, max_seq_length=8
    )
    cls, sep = tokenizer.cls, tokenizer.sep
    outcomes = set()
    for index in range(10):
        is_swapped = np.random.RandomState(1234 + index).random_sample() < 0.5
        sample = dataset[index]
        parts = [[13], [10, 11]] if is_swapped else [[10, 11], [13]]
        assert sample["input_ids"].tolist() == [cls, *parts[0], sep, *parts[1], sep, 0, 0]
        assert sample["token_type_ids"].tolist() == [0] * (len(parts[0]) + 2) + [1] * (
            len(parts[1]) + 1
        ) + [
            0,
            0,
        ]
        assert sample["next_sentence_label"] == int(is_swapped)
        assert sample["labels"].tolist() == [-100] * 8
        assert sample["attention_mask"].tolist() == [1] * 6 + [0] * 2
        outcomes.add(is_swapped)
    assert outcomes == {True, False}


@settings(deadline=None)
@given(
    first=st.integers(0, 30), second=st.integers(0, 30), length=st.integers(0, 40),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_truncation_takes_from_the_longer_part_one_by_one(
    first: int, second: int, length: int, seed: int
) -> None:
    a, b = list(range(first)), list(range(100, 100 + second))
    random = np.random.RandomState(seed)
    while len(a) + len(b) > length:
        longer = a if len(a) > len(b) else b
        longer.pop(0 if random.random() < 0.5 else -1)
    got_a, got_b = truncate_pair(
        np.arange(first), np.arange(100, 100 + second), length, np.random.RandomState(seed)
    )
    assert (got_a.tolist(), got_b.tolist()) == (a, b)


def restore(sample: dict[str, Any]) -> np.ndarray:
    return np.where(sample["labels"] >= 0, sample["labels"], sample["input_ids"])


def test_hidden_tokens_are_whole_words_within_the_budget(prefix: str, tokenizer: Tokenizer) -> None:
    data = open_indexed(prefix)
    rows = [(start, start + 5, LENGTH - 3) for start in range(0, len(data) - 5)]
    dataset = make_dataset(data, make_rows(*rows), tokenizer)
    special = [tokenizer.cls, tokenizer.sep]
    runs = set()
    for index in range(len(rows)):
        sample = dataset[index]
        tokens = restore(sample)[: sample["attention_mask"].sum()].tolist()
        hidden = set(np.nonzero(sample["labels"] >= 0)[0].tolist())
        words = find_words_slowly(tokens, tokenizer, special)
        assert all(hidden.isdisjoint(word) or hidden.issuperset(word) for word in words)
        assert not any(tokens[position] in special for position in hidden)
        assert len(hidden) <= min(0.15 * (LENGTH - 3), max(1, round(0.15 * len(tokens))))
        assert (sample["input_ids"] != restore(sample)).sum() <= len(hidden)
        runs.add(len(hidden))
    assert max(runs) == 4


def test_hidden_tokens_become_mask_or_stay_or_become_random(
    prefix: str, tokenizer: Tokenizer
) -> None:
    data = open_indexed(prefix)
    rows = [(start, start + 30, 300) for start in range(0, len(data) - 30)] * 2
    dataset = make_dataset(data, make_rows(*rows), tokenizer, max_seq_length=303)
    counts = np.zeros(3)
    for index in range(len(rows)):
        sample = dataset[index]
        hidden = sample["labels"] >= 0
        is_mask = sample["input_ids"][hidden] == tokenizer.mask
        is_kept = sample["input_ids"][hidden] == sample["labels"][hidden]
        counts += [is_mask.sum(), is_kept.sum(), (~is_mask & ~is_kept).sum()]
    # 10 % random tokens of 207 seldom give the same token or the mask again.
    assert counts.sum() > 5000
    assert np.abs(counts / counts.sum() - [0.8, 0.1, 0.1]).max() < 0.015


def test_a_published_model_is_given_no_token_that_megatron_adds(tmp_path: Path) -> None:
    """Megatron appends [BOS] and [EOS] to a vocabulary without them; such a model has no room."""
    tokenizer = make_tokenizer(tmp_path, words=4, special=SPECIAL[:5])
    added = {tokenizer.bos, tokenizer.eos}
    assert added == {9, 10}
    data, rows = [np.full(100, 8, dtype=np.uint16)], make_rows(*[(0, 1, 100)] * 20)
    values = {"max_seq_length": 103, "masked_lm_prob": 1.0, "binary_head": False}
    dataset = make_dataset(data, rows, tokenizer, **values)
    drawn = {token for index in range(20) for token in dataset[index]["input_ids"].tolist()}
    assert drawn == set(range(9)), "every other token is drawn"


def test_data_of_another_tokenizer_is_refused(tokenizer: Tokenizer) -> None:
    data = [np.array([10, 999], dtype=np.uint16)] * 2
    dataset = make_dataset(data, make_rows((0, 2, 20)), tokenizer)
    with pytest.raises(
        DataError, match=r"token 999, but the tokenizer .* has 207: it was made with"
    ):
        dataset[0]


# --- the builder ---------------------------------------------------------------------------------


def test_a_split_of_which_nothing_is_wanted_is_none(prefix: str, tokenizer: Tokenizer) -> None:
    train, valid, test = build(prefix, tokenizer)
    assert (valid, test) == (None, None)
    assert len(train) >= 300


def test_a_batch_is_int64_throughout(prefix: str, tokenizer: Tokenizer) -> None:
    train, _, _ = build(prefix, tokenizer)
    batch = default_collate([train[i] for i in range(4)])
    assert {value.dtype for value in batch.values()} == {torch.int64}
    assert batch["input_ids"].shape == (4, LENGTH)
    assert batch["next_sentence_label"].shape == (4,)


def test_without_a_sentence_order_head_there_is_one_part(prefix: str, tokenizer: Tokenizer) -> None:
    train, _, _ = build(prefix, tokenizer, binary_head=False)
    for index in range(0, len(train), 11):
        sample = train[index]
        assert "next_sentence_label" not in sample
        assert not sample["token_type_ids"].any()
        assert (sample["input_ids"] == tokenizer.sep).sum() == 1


def test_samples_do_not_depend_on_the_order_of_access_or_on_pickling(
    prefix: str, tokenizer: Tokenizer
) -> None:
    train, _, _ = build(prefix, tokenizer)
    order = np.random.default_rng(0).permutation(40).tolist()
    shuffled = {index: train[index]["input_ids"].tolist() for index in order}
    pickled = pickle.dumps(train)
    again = pickle.loads(pickled)
    assert [again[i]["input_ids"].tolist() for i in range(40)] == [shuffled[i] for i in range(40)]
    assert len(pickled) < 3000
    with pytest.raises(IndexError, match="sample 100000 of"):
        train[100_000]


def test_document_level_data_names_the_way_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prefix = write_corpus(tmp_path / "corpus_text_document", [[[7] * 20]] * 10)
    with pytest.raises(DataError, match=r"corpus_text_document, train: .* with --split-sentences"):
        build(prefix, tokenizer)
    train, _, _ = build(prefix, tokenizer, binary_head=False)
    assert len(train) >= 300
