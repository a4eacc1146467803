"""Masks and positions of left-to-right models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer.data.pretraining import get_ltor_masks_and_position_ids

EOD = 9


def reference(
    data: torch.Tensor, reset_positions: bool, reset_attention: bool, mask_loss: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """End by end, as Megatron's documentation tells it."""
    rows, length = data.shape
    visible = torch.ones(rows if reset_attention else 1, 1, length, length).tril()
    positions = torch.arange(length).repeat(rows, 1)
    loss_mask = torch.ones(rows, length)
    for row in range(rows):
        for place in range(length):
            if data[row, place] != EOD:
                continue
            if mask_loss:
                loss_mask[row, place] = 0
            if reset_attention:
                visible[row, 0, place + 1 :, : place + 1] = 0
            if reset_positions:
                positions[row, place + 1 :] = torch.arange(length - place - 1)
    return visible == 0, loss_mask, positions


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([1, 2, EOD]), min_size=7, max_size=7), min_size=1, max_size=3
    ),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_masks_are_those_made_end_by_end(
    rows: list[list[int]], flags: tuple[bool, bool, bool]
) -> None:
    data = torch.tensor(rows)
    got = get_ltor_masks_and_position_ids(data, EOD, *flags)
    for ours, theirs in zip(got, reference(data, *flags), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)


def test_one_mask_serves_all_rows_unless_it_is_reset() -> None:
    data = torch.tensor([[1, EOD, 2], [3, 4, 5]])
    shared, _, _ = get_ltor_masks_and_position_ids(data, EOD, True, False, True)
    own, _, positions = get_ltor_masks_and_position_ids(data, EOD, True, True, True)
    assert shared.shape == (1, 1, 3, 3)
    assert own[:, 0, 2].tolist() == [[True, True, False], [False, False, False]]
    assert positions.tolist() == [[0, 1, 0], [0, 1, 2]]


@pytest.mark.parametrize("length", [1, 2])
def test_short_rows_work(length: int) -> None:
    data = torch.full((2, length), EOD)
    mask, loss_mask, positions = get_ltor_masks_and_position_ids(data, EOD, True, True, True)
    assert mask.shape == (2, 1, length, length)
    assert not loss_mask.any()
    assert not positions.any()
