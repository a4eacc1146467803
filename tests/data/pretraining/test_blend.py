"""Blending: the golden order, and the rule step by step."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer.data.pretraining import blend
from rapidformer.data.pretraining.blend import (
    BlendedDataset,
    build_blend_index,
    count_for_weight,
    parse_data_prefix,
)
from rapidformer.errors import ConfigurationError, DataError

from .references import blend_slowly


def list_steps(weights: list[float], size: int) -> list[tuple[int, int]]:
    index = build_blend_index(weights, size)
    return list(zip(index["dataset"].tolist(), index["sample"].tolist(), strict=True))


def test_golden_blend() -> None:
    assert list_steps([0.5, 0.3, 0.2], 12) == [
        (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2), (2, 1), (0, 3), (1, 2), (0, 4), (0, 5),
        (1, 3),
    ]  # fmt: skip


def test_indices_have_megatrons_types() -> None:
    index = build_blend_index([0.5, 0.5], 4)
    assert [index["dataset"].dtype, index["sample"].dtype] == [np.uint8, np.int64]
    assert build_blend_index([1 / 255] * 255, 300)["dataset"].dtype == np.int16


WEIGHTS = st.lists(
    st.integers(1, 30) | st.floats(1e-6, 1.0) | st.floats(0.1, 1.0), min_size=1, max_size=8
)


@settings(deadline=None, max_examples=60)
@given(given_weights=WEIGHTS, size=st.integers(0, 3000), is_large=st.booleans())
def test_blend_is_the_rule_step_by_step(
    given_weights: list[float], size: int, is_large: bool
) -> None:
    weights = [weight / sum(given_weights) for weight in given_weights]
    # The way of large blends on small ones: many short stretches, hardly warmed up.
    before = blend._SMALL, blend._WARM_UP, blend._MAX_ROUNDS
    if is_large:
        blend._SMALL, blend._WARM_UP, blend._MAX_ROUNDS = 40, 7, 3
    try:
        steps = list_steps(weights, size)
    finally:
        blend._SMALL, blend._WARM_UP, blend._MAX_ROUNDS = before
    assert steps == blend_slowly(weights, size)


@pytest.mark.parametrize("weights", [[0.62, 0.25, 0.13], [0.9, 0.0999, 0.0001], [1 / 7] * 7])
def test_a_large_blend_is_the_rule_step_by_step(weights: list[float]) -> None:
    size = 2 * blend._SMALL
    assert list_steps(weights, size) == blend_slowly(weights, size)


def test_weights_and_prefixes_by_turns() -> None:
    parts = parse_data_prefix(["3", "a_text_document", "1", " b "])
    assert [(part.weight, part.prefix) for part in parts] == [
        (0.75, "a_text_document"),
        (0.25, "b"),
    ]
    assert parse_data_prefix("a b") == parse_data_prefix(["a b"]) == [(1.0, "a b")]


@pytest.mark.parametrize(
    ("given_words", "reason"),
    [
        (
            ["0.3", "a", "b"],
            "--data-path has 3 items, which are no pairs; 'b' in --data-path is no",
        ),
        (["a", "0.3", "b", "0.7"], "'a' in --data-path is not a positive number; 'b' in"),
        (["0", "a", "1", "b"], "'0' in --data-path is not a positive number"),
        (["-1", "a", "2", "b"], "'-1' in --data-path is not a positive number"),
        (["nan", "a", "inf", "b"], "'nan' in --data-path is not a positive number; 'inf'"),
        ([], "--data-path is empty"),
    ],
)
def test_a_bad_blend_says_what_is_wrong_with_it(given_words: list[str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(reason)) as caught:
        parse_data_prefix(given_words)
    assert "0.3 first_text_document 0.7 second_text_document" in str(caught.value)


@settings(max_examples=200)
@given(given_weights=WEIGHTS, size=st.integers(1, 500))
def test_no_data_set_of_a_blend_runs_out(given_weights: list[float], size: int) -> None:
    weights = [weight / sum(given_weights) for weight in given_weights]
    counts = np.bincount(build_blend_index(weights, size)["dataset"], minlength=len(weights))
    assert all(
        count <= count_for_weight(size, weight)
        for count, weight in zip(counts, weights, strict=True)
    )


def make_blend(*datasets: Any, weights: list[float], size: int) -> BlendedDataset:
    return BlendedDataset(datasets, build_blend_index(weights, size))


def test_samples_come_from_the_data_sets_in_the_order_of_the_blend() -> None:
    blended = make_blend("abcdefg", "123", weights=[0.75, 0.25], size=8)
    assert len(blended) == 8
    assert "".join(blended[i] for i in range(8)) == "a1bcd2ef"
    assert [blended.find_set(i) for i in range(3)] == ["number 1", "number 2", "number 1"]
    assert blended[-1] == "f"
    with pytest.raises(IndexError, match="sample 8 of 8"):
        blended[8]


def test_a_data_set_that_is_too_short_is_refused() -> None:
    with pytest.raises(DataError, match="number 2 has 1 samples of 2"):
        make_blend("abcdefg", "1", weights=[0.75, 0.25], size=8)
