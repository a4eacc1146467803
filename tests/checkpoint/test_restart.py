"""What another attempt of the launcher's does with the folder of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapidformer.checkpoint.finding import claim_folder, continue_after_restart
from rapidformer.config import parse_arguments


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The second attempt of a launch."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    return monkeypatch


def save(folder: Path) -> None:
    (folder / "iter_0000004" / "state").mkdir(parents=True)
    (folder / "iter_0000004" / "run.json").write_text("{}")


def test_it_continues_from_what_the_run_has_saved(
    tmp_path: Path, attempt: pytest.MonkeyPatch
) -> None:
    claim_folder(tmp_path)
    save(tmp_path)
    words = ["--save", str(tmp_path), "--load", "elsewhere", "--finetune", "--overwrite"]
    args = continue_after_restart(parse_arguments(words))
    assert (args.load, args.finetune, args.overwrite) == (str(tmp_path), False, False)
    assert args.sources["load"] == "restart"


def test_it_begins_again_where_nothing_was_saved(
    tmp_path: Path, attempt: pytest.MonkeyPatch
) -> None:
    claim_folder(tmp_path)
    args = continue_after_restart(
        parse_arguments(["--save", str(tmp_path), "--load", "there", "--finetune"])
    )
    assert (args.load, args.finetune, args.overwrite) == ("there", True, True)


def test_another_runs_folder_is_not_taken(tmp_path: Path, attempt: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    args = parse_arguments(["--save", str(tmp_path)])
    assert continue_after_restart(args) is args, "nobody's: the check that follows refuses it"
    attempt.setenv("TORCHELASTIC_RUN_ID", "another")
    claim_folder(tmp_path)
    attempt.setenv("TORCHELASTIC_RUN_ID", "ours")
    assert continue_after_restart(args) is args


@pytest.mark.parametrize("name", ["none", ""])
def test_without_a_launch_of_its_own_name_nothing_changes(
    name: str, tmp_path: Path, attempt: pytest.MonkeyPatch
) -> None:
    attempt.setenv("TORCHELASTIC_RUN_ID", name)
    claim_folder(tmp_path)
    save(tmp_path)
    args = parse_arguments(["--save", str(tmp_path)])
    assert continue_after_restart(args) is args
    assert not (tmp_path / ".launch").exists()


def test_first_attempt_never_continues_by_itself(
    tmp_path: Path, attempt: pytest.MonkeyPatch
) -> None:
    claim_folder(tmp_path)
    save(tmp_path)
    attempt.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    args = parse_arguments(["--save", str(tmp_path)])
    assert continue_after_restart(args) is args
