"""SIGTERM and SIGUSR1, as a scheduler sends them: the run saves, says so, and can be requeued."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from rapidformer.checkpoint.finding import find_checkpoint
from rapidformer.launch.signals import SAVING, Preemption, handling, raise_signal
from rapidformer.launch.worker import get_rank_file
from tests.faults.campaign.kills import Reference, compare
from tests.faults.campaign.runs import Run
from tests.processes import wait_until


@pytest.mark.parametrize(
    ("layout", "ranks", "name"), [("1 process", 1, "SIGUSR1"), ("2 processes", 2, "SIGTERM")]
)
def test_a_run_that_is_preempted_saves_and_continues_exactly(
    layout: str, ranks: int, name: str, python: Path, tmp_path: Path
) -> None:
    number = getattr(signal, name)
    run = Run(python, tmp_path / "run", layout)
    process = run.start(WAIT_FOR=name)
    waiting = [run.folder / "trace" / f"waiting_{rank}" for rank in range(ranks)]
    wait_until(lambda: all(path.exists() for path in waiting) or process.poll() is not None)
    process.send_signal(number)
    outcome = run.finish(process)
    assert outcome.status == 128 + number, outcome.output
    # Ranks stop a few steps after the one at which the last of them noticed.
    assert find_checkpoint(run.save) is not None, outcome.output
    assert "Traceback" not in outcome.output
    assert run.finish(run.start()).status == 0, "the same command again"
    assert list(compare(run, Reference(python, tmp_path / "other", layout))) == []


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    numbers = (signal.SIGHUP, *SAVING)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with handling(numbers, raise_signal):
            preemption = Preemption(tmp_path, say=lambda text: None)
            signal.signal(signal.SIGHUP, raise_signal)  # as torch's agent does
            preemption.begin_round({})
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def test_the_launcher_passes_on_the_first_signal_and_obeys_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {number: signal.getsignal(number) for number in SAVING}
    sent: list[Any] = []
    preemption = Preemption(tmp_path, say=lambda text: None)
    try:
        preemption.begin_round({0: 10, 1: 11})
        get_rank_file("saving", tmp_path, 0).touch()
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)  # rank 1 does not train yet: it could not save
        get_rank_file("saving", tmp_path, 1).touch()
        kill = os.kill
        monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
        kill(os.getpid(), signal.SIGUSR1)
        assert sent == [(10, signal.SIGUSR1), (11, signal.SIGUSR1)]
        assert preemption.is_outcome(138) and not preemption.is_outcome(1)
        with pytest.raises(SignalException):
            kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, action in before.items():
            signal.signal(number, action)
