"""Short forms of the fault campaigns; ``benchmarks/fault_campaign.py`` runs the long ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.campaign.corruptions import DAMAGES, run_corruptions
from tests.faults.campaign.fuzz import run_fuzz
from tests.faults.campaign.kills import Reference, kill_once


@pytest.fixture(scope="module")
def reference(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(python, tmp_path_factory.mktemp("reference"), "1 process")


@pytest.mark.parametrize("moment", ["forward", "remove"])
def test_a_run_that_is_killed_and_started_again_is_the_run_that_lived(
    moment: str, reference: Reference, tmp_path: Path
) -> None:
    kill = kill_once(reference, tmp_path / "killed", moment, random.Random(0))
    assert kill.was_killed and kill.problems == []


def test_damage_is_noticed_and_the_checkpoint_before_is_taken(
    reference: Reference, tmp_path: Path
) -> None:
    found = run_corruptions(reference.run.save, tmp_path / "damaged", runs=len(DAMAGES), seed=0)
    assert [(each.damage, each.problems) for each in found if each.problems] == []


def test_no_words_and_no_file_are_a_traceback(tmp_path: Path) -> None:
    assert [each for each in run_fuzz(tmp_path, runs=60, seed=0) if each.problem] == []
