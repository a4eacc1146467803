"""BERT's and T5's sentence maps: the golden vectors, and a sentence-by-sentence walk."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer.data.pretraining import sentence_map
from rapidformer.data.pretraining.sentence_map import (
    build_sentence_map,
    draw_uint32,
    draw_uint64,
)
from rapidformer.errors import DataError

from .references import SlowTwister64, map_sentences_slowly

DOC_IDX = [0, 3, 4, 9, 12]
SIZES = [5, 7, 4, 9, 3, 8, 6, 5, 2, 10, 600, 3]


def build(doc_idx: list[int] = DOC_IDX, sizes: list[int] = SIZES, **changed: Any) -> np.ndarray:
    values = {
        "num_samples": 6, "max_length": 13, "short_seq_prob": 0.1, "min_sentences": 2,
        "seed": 1234,
    }  # fmt: skip
    return build_sentence_map(
        np.array(doc_idx), np.array(sizes, dtype=np.int32), **(values | changed)
    )


@pytest.mark.parametrize(
    ("min_sentences", "short_seq_prob", "rows"),
    [
        (2, 0.1, [(7, 9, 13), (4, 7, 13), (0, 3, 13), (7, 9, 13), (4, 7, 13), (0, 3, 13)]),
        (2, 0.5, [(7, 9, 13), (4, 6, 8), (0, 3, 13), (6, 9, 13), (4, 7, 13), (0, 3, 6)]),
        (1, 0.5, [(0, 3, 13), (7, 9, 2), (3, 4, 8), (3, 4, 13), (4, 6, 10), (0, 3, 13),
                  (4, 7, 12), (7, 9, 12), (6, 7, 6)]),
    ],
)  # fmt: skip
def test_golden_maps(
    min_sentences: int, short_seq_prob: float, rows: list[tuple[int, int, int]]
) -> None:
    built = build(min_sentences=min_sentences, short_seq_prob=short_seq_prob)
    assert list(map(tuple, built.tolist())) == rows
    assert built.dtype == np.uint32


def test_golden_numbers_of_the_64_bit_twister() -> None:
    numbers = next(draw_uint64(1235, 3))[:3].tolist()
    assert numbers == [12475983374653888083, 573922149886606219, 5802434057304372554]


@given(seed=st.integers(0, 2**64 - 1))
@settings(max_examples=10, deadline=None)
def test_the_64_bit_twister_is_its_definition(seed: int) -> None:
    slow = SlowTwister64(seed)
    for block in islice(draw_uint64(seed, 700), 2):
        assert block.tolist() == [slow.draw() for _ in block]


def test_blocks_of_the_32_bit_twister_are_single_draws() -> None:
    random = np.random.RandomState(7)
    for block in islice(draw_uint32(7, 5), 3):
        assert block.tolist() == [random.randint(0, 2**32, dtype=np.uint32) for _ in range(5)]


@settings(deadline=None, max_examples=150)
@given(
    documents=st.lists(
        st.lists(st.sampled_from([0, 1, 2, 5, 9, 20, 40, 600]), max_size=9), min_size=1, max_size=12
    ),
    num_samples=st.integers(1, 60),
    max_length=st.integers(2, 60),
    short_seq_prob=st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.4, 0.5, 1.0]),
    min_sentences=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
    block=st.sampled_from([1, 3, 64]),
)
def test_map_is_that_of_a_walk_over_the_sentences(
    documents: list[list[int]],
    num_samples: int,
    max_length: int,
    short_seq_prob: float,
    min_sentences: int,
    seed: int,
    block: int,
) -> None:
    documents = [*documents, [3, 4]]
    doc_idx = np.cumsum([0, *map(len, documents)]).tolist()
    sizes = [size for document in documents for size in document]
    expected = map_sentences_slowly(
        doc_idx, sizes, num_samples, max_length, short_seq_prob, min_sentences, seed
    )
    block_before, sentence_map._BLOCK = sentence_map._BLOCK, block
    try:
        built = build(
            doc_idx,
            sizes,
            num_samples=num_samples,
            max_length=max_length,
            short_seq_prob=short_seq_prob,
            min_sentences=min_sentences,
            seed=seed,
        )
    finally:
        sentence_map._BLOCK = block_before
    assert list(map(tuple, built.tolist())) == expected


def test_a_long_shuffle_is_swaps_one_by_one() -> None:
    order, twister = list(range(20_000)), SlowTwister64(99)
    for i in range(len(order) - 1, 0, -1):
        j = twister.draw() % (i + 1)
        order[i], order[j] = order[j], order[i]
    assert sentence_map._shuffle(20_000, 99).tolist() == order


def test_a_part_of_the_documents_keeps_the_numbers_of_its_sentences() -> None:
    whole = build(DOC_IDX[:3], SIZES[:4])
    later = build([3, 6, 7], [1, 1, 1, *SIZES[:4]])
    assert (later[:, :2] == whole[:, :2] + 3).all()
    assert (later[:, 2] == whole[:, 2]).all()


def test_no_number_of_samples_goes_through_once() -> None:
    assert len(build(num_samples=None, short_seq_prob=0.0)) == 3


def test_documents_of_one_sentence_are_refused_for_sentence_order() -> None:
    with pytest.raises(DataError, match="none of the 3 documents can be used: 3 have fewer than 2"):
        build([0, 1, 2, 3], [4, 4, 4])
    with pytest.raises(DataError, match="--split-sentences, or train without the sentence-order"):
        build([0, 1, 2, 3], [4, 4, 4])


def test_documents_with_overlong_sentences_are_refused() -> None:
    with pytest.raises(DataError, match="1 have a sentence of more than 512 tokens"):
        build([0, 2], [600, 3])


def test_a_sample_without_room_for_text_is_refused() -> None:
    with pytest.raises(DataError, match=r"can hold 1 tokens of text.*longer --seq-length"):
        build(max_length=1)
