"""Garbage collection stays out of steps, and is as it was before when the loop ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rapidformer.training.garbage import GarbageCollection


@pytest.fixture(autouse=True)
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An entry for each full collection, which here looks at the youngest objects only.

    All objects are what the other tests have imported and made: that takes seconds.
    """
    counts: list[int] = []
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda: counts.append(collect(0)))
    was_on = gc.isenabled()
    gc.enable()
    gc.unfreeze()
    yield counts
    gc.freeze()  # as tests/conftest.py leaves it
    if not was_on:
        gc.disable()


def test_nothing_is_collected_during_a_step_and_everything_is_restored_after_an_error(
    collected: list[int],
) -> None:
    seen = []
    collection = GarbageCollection(100, freezes_after=1)
    with pytest.raises(ZeroDivisionError), collection:
        before = gc.get_freeze_count()
        newer: list[list[int]] = [[] for _ in range(1000)]
        with collection.held_back():
            seen.append(gc.isenabled())
        assert before > 0
        assert gc.get_freeze_count() > before + len(newer) / 2
        seen += [gc.isenabled(), gc.get_freeze_count() > 0]
        with collection.held_back():
            raise ZeroDivisionError
    assert seen == [False, True, True]
    assert len(collected) == 2  # before the first step, and after one
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_user_who_turned_it_off_keeps_it_off(collected: list[int]) -> None:
    gc.disable()
    collection = GarbageCollection(1, freezes_after=1)
    with collection, collection.held_back():
        pass
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert not collected


def test_objects_frozen_by_the_user_stay_frozen(collected: list[int]) -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    collection = GarbageCollection(1, freezes_after=1)
    with collection, collection.held_back():
        pass
    # A few may die meanwhile, as nobody refers to them any more.
    assert gc.get_freeze_count() > 0.9 * count
    assert not collected
