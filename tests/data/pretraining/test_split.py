"""--split by Megatron's arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapidformer.data.pretraining.blend import split_bounds
from rapidformer.errors import ConfigurationError

from .references import split_slowly


@pytest.mark.parametrize(
    ("text", "size", "bounds"),
    [
        ("980,20", 1000, [0, 980, 1000, 1000]),
        ("969, 30, 1", 1000, [0, 969, 999, 1000]),
        ("969, 30, 1", 10, [0, 10, 10, 10]),
        ("98,2,0", 7, [0, 7, 7, 7]),
        ("90/5/5", 33, [0, 29, 31, 33]),
        ("1", 5, [0, 5, 5, 5]),
        ("1,1", 3, [0, 1, 3, 3]),
    ],
)
def test_golden_splits(text: str, size: int, bounds: list[int]) -> None:
    assert split_bounds(text, size) == bounds


@given(
    weights=st.lists(st.integers(0, 1000) | st.floats(0, 10), min_size=1, max_size=3).filter(
        lambda weights: sum(weights) > 1e-6
    ),
    size=st.integers(0, 10**9),
    separator=st.sampled_from([",", "/", " , ", "/ "]),
)
def test_splits_are_those_of_a_plain_walk(weights: list[float], size: int, separator: str) -> None:
    bounds = split_bounds(separator.join(map(repr, weights)), size)
    expected = split_slowly([float(weight) for weight in weights], size)
    assert bounds == [max(bound, 0) for bound in expected]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0
    assert bounds[-1] == size


def test_a_first_share_of_nothing_never_starts_before_the_data() -> None:
    assert split_bounds("0,1,1", 3) == [0, 0, 1, 3]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("90,-5", "-5 is negative"),
        ("0,0,0", "all the weights are zero"),
        ("most", "'most' is no number"),
        ("90,ten,x", "'ten' is no number, 'x' is no number"),
        ("90,", "'' is no number"),
        ("nan,1", "'nan' is no number"),
        ("1,2,3,4", "there are 4 numbers"),
    ],
)
def test_a_bad_split_says_what_is_wrong_with_it(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match="--split") as caught:
        split_bounds(text, 10)
    assert reason in str(caught.value)
    assert "such as 969,30,1" in str(caught.value)
