"""Which failure is told: the one that the others follow from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rapidformer.launch.failures import Failure, choose_first, read_report, report_failure


def make(rank: int, **values: Any) -> Failure:
    base: dict[str, Any] = {"node": 0, "host": "a", "nodes": 1, "status": 1, "time": 10.0}
    return Failure(rank=rank, **(base | values))


def test_what_failed_by_itself_has_not_been_ended() -> None:
    """It was about to leave when the launcher ended it with the others."""
    assert make(1, status=-15, message="the loss is nan").exit_code == 1
    assert make(1, status=-15).exit_code == 143


LOST = "Traceback\nRuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:35"


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([make(0, time=2, message="b"), make(1, time=1, message="a")], 1),
        # The killed one is noticed after the others have complained.
        ([make(0, time=1, message=LOST), make(1, time=2, status=-9)], 1),
        ([make(0, time=1, message=LOST), make(1, time=2, message="a defect")], 1),
        # Those that the launcher has ended itself come last.
        ([make(0, time=1, status=-15), make(1, time=2, status=3)], 1),
        ([make(2, time=1, message=LOST), make(1, time=1, message=LOST)], 1),
    ],
    ids=["the earlier", "killed", "cause", "ended by us", "all lost"],
)
def test_first_failure(failures: list[Failure], first: int) -> None:
    assert choose_first(failures).rank == first
    assert choose_first(reversed(failures)).rank == first


@pytest.mark.parametrize(
    ("failure", "text", "code"),
    [
        (make(0, message="mend it"), "mend it", 1),
        (make(3, message="mend it"), "rank 3: mend it", 1),
        (make(0, nodes=2, node=1, message="mend it"), "rank 0 (node 1, a): mend it", 1),
        (make(1, message="Traceback\nX: y\n"), "rank 1 failed:\nTraceback\nX: y", 1),
        (make(1, status=7), "rank 1 ended with status 7; see its own message above.", 7),
        (make(1, status=7, log="f"), "rank 1 ended with status 7; its output is in f.", 7),
        (
            make(1, status=-9),
            "rank 1 was ended by signal SIGKILL (usually because memory ran out).",
            137,
        ),
        (make(1, status=-7), "rank 1 was ended by signal SIGBUS (a file that it had mapped was cut "
         "short, or shared memory or the disk is full).", 135),
        (make(1, status=-11, log="f"),
         "rank 1 was ended by signal SIGSEGV; its output is in f.", 139),
    ],
)  # fmt: skip
def test_words_and_exit_status(failure: Failure, text: str, code: int) -> None:
    assert failure.describe() == text
    assert failure.exit_code == code
    assert Failure(**json.loads(json.dumps(asdict(failure)))) == failure


def test_summary_is_the_line_that_says_most() -> None:
    assert make(1, message="Traceback\n  File\nX: y\n").summarize() == "rank 1: X: y"
    assert make(1, message="2 problems:\n - a").summarize() == "rank 1: 2 problems:"


def test_report_comes_back_as_it_was_left(tmp_path: Any, monkeypatch: Any) -> None:
    file = tmp_path / "error.json"
    monkeypatch.delenv("RAPIDFORMER_ERRORS_TO_PARENT", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert not report_failure("under torchrun nobody reads it")
    monkeypatch.setenv("RAPIDFORMER_ERRORS_TO_PARENT", "1")
    assert report_failure("wrong", is_mistake=True)
    report = read_report(str(file))
    assert (report["message"], report["is_mistake"]) == ("wrong", True)
    file.write_text("{half")
    assert read_report(str(file)) == {}
    assert read_report("") == {}


def test_a_report_is_there_whole_or_not_at_all(tmp_path: Any, monkeypatch: Any) -> None:
    """All ranks are stopped when one has failed: torch raised on the half report of another."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("RAPIDFORMER_ERRORS_TO_PARENT", "1")

    def stop_here(staged: Path, target: str) -> None:
        assert json.loads(staged.read_text())["message"]["message"] == "wrong"
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop_here)
    with pytest.raises(KeyboardInterrupt):
        report_failure("wrong")
    assert not file.exists()
