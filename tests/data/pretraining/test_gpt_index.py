"""GPT's index maps: the golden vectors, and a token-by-token walk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer.data.pretraining import gpt
from rapidformer.data.pretraining.gpt import build_gpt_index
from rapidformer.errors import DataError

from .references import index_gpt_slowly

SIZES = np.array([5, 3, 8, 2, 6], dtype=np.int32)


def build(sizes: Any, **settings: Any) -> SimpleNamespace:
    values = {"start": 0, "stop": len(sizes), "num_samples": 5, "seq_length": 4, "seed": 1234}
    maps = build_gpt_index(np.asarray(sizes, dtype=np.int32), **(values | settings))
    return SimpleNamespace(**maps)


def test_golden_index_of_one_epoch() -> None:
    index = build(SIZES, num_samples=5)
    assert index.documents.tolist() == [4, 0, 1, 2, 3]
    assert index.samples.tolist() == [[0, 0], [0, 4], [1, 2], [2, 1], [3, 2], [3, 6]]
    assert index.shuffle.tolist() == [3, 2, 1, 0, 4]
    assert [array.dtype for array in vars(index).values()] == [np.int32, np.int32, np.uint32]


def test_golden_index_with_the_last_epoch_apart() -> None:
    index = build(SIZES, num_samples=14)
    assert index.documents.tolist() == [2, 2, 4, 1, 0, 3, 4, 0, 1, 3, 0, 4, 3, 2, 1]
    assert index.samples.tolist() == [
        [0, 0], [0, 4], [1, 0], [1, 4], [2, 0], [2, 4], [3, 2], [4, 3], [6, 0], [6, 4],
        [7, 2], [8, 1], [10, 0], [10, 4], [11, 3], [12, 1], [13, 3], [13, 7],
    ]  # fmt: skip
    assert index.shuffle.tolist() == [3, 9, 2, 1, 7, 5, 4, 0, 8, 6, 10, 16, 12, 15, 14, 11, 13]


@settings(deadline=None, max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    seq_length=st.integers(1, 9),
    num_samples=st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
    chunk=st.integers(1, 7),
)
def test_index_is_that_of_a_walk_over_the_tokens(
    sizes: list[int], seq_length: int, num_samples: int, seed: int, chunk: int
) -> None:
    if sum(sizes) <= seq_length:
        sizes = [*sizes, seq_length + 1]
    chunk_before, gpt._CHUNK = gpt._CHUNK, chunk
    try:
        index = build(sizes, num_samples=num_samples, seq_length=seq_length, seed=seed)
    finally:
        gpt._CHUNK = chunk_before
    documents, samples, order = index_gpt_slowly(sizes, num_samples, seq_length, seed)
    assert index.documents.tolist() == documents
    assert list(map(tuple, index.samples.tolist())) == samples
    assert index.shuffle.tolist() == order
    assert len(order) >= num_samples


def test_a_range_of_sequences_keeps_their_numbers_in_the_file() -> None:
    shifted = build([1, 2, *SIZES, 9], start=2, stop=7)
    whole = build(SIZES)
    assert (shifted.documents == whole.documents + 2).all()
    assert (shifted.samples == whole.samples).all()


def test_no_number_of_samples_takes_each_token_once() -> None:
    assert len(build(SIZES, num_samples=None).shuffle) == (SIZES.sum() - 1) // 4


def test_data_shorter_than_a_sample_is_refused_with_the_numbers() -> None:
    with pytest.raises(DataError, match=r"5 sequences hold 24 tokens, fewer than the 31 of one"):
        build(SIZES, seq_length=30)
    with pytest.raises(DataError, match="hold 0 tokens"):
        build([0, 0], seq_length=1)
