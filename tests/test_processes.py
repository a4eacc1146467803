"""The tests' own ranks: where they come from, and that a crash is reported, once and in full."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.processes import end_idle_processes, run_in_kept_processes, run_in_processes


def test_ranks_return_in_order_and_know_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "here")
    monkeypatch.chdir(tmp_path)
    suffix = "!"

    def look() -> tuple[str, str, str]:
        return os.environ["RANK"], os.environ["OF_THE_TEST"] + suffix, str(Path.cwd())

    expected = [(rank, "here!", str(tmp_path)) for rank in ("0", "1")]
    assert run_in_processes(look, 2) == expected


def test_a_rank_starts_with_one_thread() -> None:
    """A fork of a threaded process inherits locks that nobody will ever release."""
    assert run_in_processes(lambda: len(list(Path("/proc/self/task").iterdir())), 1) == [1]


def test_a_failure_names_its_rank() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed:.*ValueError: on purpose"):
        run_in_processes(_fail_on_rank_1, 2)


def test_a_crash_is_reported_with_its_stack_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 failed:.*Segmentation fault.*in _crash"):
        run_in_processes(_crash, 1, tmp_path / "calls")
    assert (tmp_path / "calls").read_text() == "called\n"


def test_kept_ranks_take_the_next_call_in_its_environment_until_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> tuple[int, str | None, str, float]:
        return os.getpid(), os.environ.get("OF_THE_TEST"), str(Path.cwd()), random.random()

    (first, *before), (second, *_) = run_in_kept_processes(look, 2)
    monkeypatch.setenv("OF_THE_TEST", "here")
    monkeypatch.chdir(tmp_path)
    expected = [(rank, "here", str(tmp_path), before[-1]) for rank in (first, second)]
    assert run_in_kept_processes(look, 2) == expected
    with pytest.raises(AssertionError, match="on purpose"):
        run_in_kept_processes(_fail_on_rank_1, 2)
    assert not {first, second} & {rank for rank, *_ in run_in_kept_processes(look, 2)}


def test_kept_ranks_end_when_nobody_has_called_them_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first,) = run_in_kept_processes(os.getpid, 1)
    end_idle_processes()
    assert run_in_kept_processes(os.getpid, 1) == [first]
    monkeypatch.setattr("tests.processes.MOST_IDLE_SECONDS", -1)
    end_idle_processes()
    assert run_in_kept_processes(os.getpid, 1) != [first]


def _fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("on purpose")


def _crash(calls: Path) -> None:
    with calls.open("a") as file:
        file.write("called\n")
    os.kill(os.getpid(), signal.SIGSEGV)
