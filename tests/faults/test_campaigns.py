"""Short forms of the fault campaigns; ``benchmarks/fault_campaign.py`` runs the long ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.campaign.corruptions import DAMAGES, run_corruptions
from tests.faults.campaign.fuzz import run_fuzz
from tests.faults.campaign.kills import Reference, kill_once
from tests.faults.campaign.layouts import Campaign


@pytest.fixture(scope="module")
def reference(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(python, tmp_path_factory.mktemp("reference"), "1 process")


@pytest.mark.parametrize("moment", ["forward", "remove"])
def test_a_run_that_is_killed_and_started_again_is_the_run_that_lived(
    moment: str, reference: Reference, tmp_path: Path
) -> None:
    kill = kill_once(reference, tmp_path / "killed", moment, random.Random(0))
    assert kill.was_killed and kill.problems == []


@pytest.mark.parametrize(
    ("route", "dropout"),
    [(("DDP 2", "TP 2", "ZeRO-3 2"), 0.1), (("EP 2", "PP 2", "DDP 2"), 0.0)],
    ids=["with dropout", "without dropout"],
)
def test_a_run_that_changes_its_layout_is_the_run_that_did_not(
    route: tuple[str, ...], dropout: float, tmp_path: Path
) -> None:
    """From slices to replicas, both replicas once got the same masks; to slices, different ones."""
    found = Campaign(tmp_path / "routes", dropout).follow(route)
    assert [(each.layouts, each.problems) for each in found] == [
        (route[:2], []), (route, []),
    ]  # fmt: skip


def test_damage_is_noticed_and_the_checkpoint_before_is_taken(
    reference: Reference, tmp_path: Path
) -> None:
    found = run_corruptions(reference.run.save, tmp_path / "damaged", runs=len(DAMAGES), seed=0)
    assert [(each.damage, each.problems) for each in found if each.problems] == []


def test_no_words_and_no_file_are_a_traceback(tmp_path: Path) -> None:
    assert [each for each in run_fuzz(tmp_path, runs=60, seed=0) if each.problem] == []
